"""The part of a checkpoint that is the optimizer's, beside the core's tensors: states of an optimizer that runs itself,
values of param groups, the schedule."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from tessera import _core
from tessera._blobs import CUT, OWN_KINDS, Saved, check_like, check_taken, cut_of
from tessera.engine._run import Run
from tessera.errors import ConfigError, IoError
from tessera.optim.engines import ExternalRunner, SlicesRunner

# Ranks along these have the same states where those are not sharded.
_COPIES = [_core.Axis.DpReplicate, _core.Axis.DpShard, _core.Axis.Sp]
_COUNTS = frozenset({"last_epoch", "last_batch_iteration"})  # numbers without which a schedule is nothing
# Lists of torch's schedules with one entry for each param group.
_OF_GROUPS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")

# Schedules of torch that know no more than the number of steps, for runs that were saved from C++.
_OF_STEPS_ALONE = (
    lr_scheduler.StepLR,
    lr_scheduler.MultiStepLR,
    lr_scheduler.ConstantLR,
    lr_scheduler.LinearLR,
    lr_scheduler.ExponentialLR,
    lr_scheduler.CosineAnnealingLR,
    lr_scheduler.PolynomialLR,
    lr_scheduler.CosineAnnealingWarmRestarts,
    lr_scheduler.CyclicLR,
    lr_scheduler.OneCycleLR,
    lr_scheduler.LambdaLR,
)


# ---------------------------------------------------------------- states of a client's optimizer


def client_states(run: Run, names: dict[int, str]) -> tuple[dict[str, Any], list[tuple[int, str, torch.Tensor]]]:
    """States of an optimizer that runs itself: those that are not a value for each element of this rank's part, by
    parameter (with CUT where that says what of it they are of), and those that are. Where all ranks have the same, one
    has it here."""
    numbers: dict[str, Any] = {}
    states: list[tuple[int, str, torch.Tensor]] = []
    runner = run._updates.runner
    if not isinstance(runner, ExternalRunner):
        return numbers, states
    whole = not run._settings.placements.shards_states
    mesh = run.core.mesh()
    writes = not whole or all(mesh.rank(axis) == 0 for axis in _COPIES)
    specs = run.core.params()
    for number, param, target in runner.targets:
        name = names[id(param)]
        kept_whole = _whole_states(runner, number)
        for key, value in runner.base.state.get(target, {}).items():
            is_part = isinstance(value, torch.Tensor) and _core.ClientStates.is_part(key, value, target)
            if is_part and key not in kept_whole:
                if key in OWN_KINDS:
                    raise ConfigError(f"[engine.save_checkpoint] an optimizer state cannot be named {key!r}")
                states.append((number, key, value))
            elif writes or specs[number].varies.name:
                numbers.setdefault(name, {})[key] = value
                if _is_cut(value):
                    numbers[name][CUT] = _cut_here(run, specs[number], number, target)
    return numbers, states


def _is_cut(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _whole_states(runner: ExternalRunner, number: int) -> frozenset[str]:
    """States of a parameter that every rank has whole."""
    return runner.whole_states(number) if isinstance(runner, SlicesRunner) else frozenset()


def _cut_here(run: Run, spec: _core.ParamSpec, number: int, target: torch.Tensor) -> list[Any]:
    if (runner := run._updates.runner) and isinstance(runner, SlicesRunner):
        return cut_of(0, math.prod(spec.whole_sizes), spec.whole_sizes)
    mesh = run.core.mesh()
    return cut_of(*run.core.local_range(number), target.shape, mesh.rank(spec.varies), mesh.size(spec.varies))


def _fitting(name: str, states: list[dict[str, Any]], cut: list[Any]) -> dict[str, Any]:
    """Returns the last of the states that ranks have saved for a parameter which is of this cut."""
    fitting = [state for state in states if CUT not in state or state[CUT] == cut]
    if states and not fitting:
        begin, end, shape, *_ = states[-1][CUT]
        of = ", ".join(repr(key) for key, value in states[-1].items() if _is_cut(value))
        raise ConfigError(
            f"[engine.load_checkpoint] {of} of '{name}' are neither numbers nor one value for each element, and are of "
            f"elements {begin} to {end} in shape {shape} there, of {cut[0]} to {cut[1]} in {cut[2]} here: load with "
            "the ranks and the stage they were saved with, or pass load_optimizer_states=False"
        )
    return {key: value for key, value in (fitting[-1] if fitting else {}).items() if key != CUT}


def states_from(
    run: Run, restore: _core.Restore, saved: Saved, names: dict[int, str]
) -> dict[int, dict[str, Any]] | None:
    """Returns the states that the client's optimizer shall have, by number of the parameter. None where the core
    updates."""
    runner = run._updates.runner
    if not isinstance(runner, ExternalRunner):
        return None
    reader = saved.reader
    kinds = sorted({kind for _, kind, *_ in reader.tensors()} - OWN_KINDS)
    own = f"optimizer-{_core.checkpoint_place(run.core)}"
    numbers: dict[str, list[dict[str, Any]]] = {}
    for _, of_rank in sorted(saved.optimizers(), key=lambda blob: (blob[0] == own, blob[0])):  # its own last: it holds
        for name, state in of_rank.items():
            numbers.setdefault(name, []).append(state)
    specs = run.core.params()
    records = {alias: p for p in reader.params() for alias in (p.name, *p.aliases)}
    result: dict[int, dict[str, Any]] = {}
    for number, param, target in runner.targets:
        record = records.get(names[id(param)])
        if record is None:
            continue
        of_all = numbers.get(record.name, [])
        state = _fitting(record.name, of_all, _cut_here(run, specs[number], number, target)) if of_all else {}
        kept_whole = _whole_states(runner, number)
        for kind in (
            kept_whole & set(kinds) - state.keys()
        ):  # of one row: it lies beside the weights in some checkpoints
            if (value := reader.read(record.name, kind)) is not None:
                state[kind] = value.to(target.device)
        for kind in kinds:
            part = None if kind in kept_whole else restore.client_state(number, kind)
            if part is not None:
                state[kind] = part.to(target.device).as_strided(target.shape, target.stride())
        for key in (key for key, value in state.items() if isinstance(value, torch.Tensor)):
            state[key] = _core.ClientStates.part_of_number(key, state[key], specs[number].whole_sizes, target)
        if "step" not in state and record.step > 0 and state:
            state["step"] = torch.tensor(float(record.step))
        elif "step" not in state and not any(isinstance(part, torch.Tensor) and part.any() for part in state.values()):
            state = {}  # the states before a first step
        present = runner.base.state.get(target) or {}
        result[number] = _fitted(state, present, runner.base, f"the optimizer's state of '{record.name}'")
    return result


def _fitted(state: dict[str, Any], present: dict[str, Any], base: torch.optim.Optimizer, what: str) -> dict[str, Any]:
    """`state` with numbers of the kind that they have in `present`. IoError for what cannot be in its place. All that
    is known of a client's optimizer is what it has now, and "step"; of torch's own, that a state has all from the first
    step on, in one shape."""
    for key, value in state.items():
        held = present.get(key, 0 if key == "step" else None)
        check_like(value, held, f"{what}, {key!r}", finite=key == "step")
        if key == "step" and held is not None and value < 0:
            raise IoError(f"[checkpoint] {what}, 'step' is damaged: {value!r:.40} is no number that can be")
        held_here = held if isinstance(held, torch.Tensor) and held.dim() > 0 else None
        may_grow = isinstance(value, torch.Tensor) and not _makes_all_at_once(base)
        if (
            not may_grow
            and held_here is not None
            and value is not None
            and getattr(value, "shape", 0) != held_here.shape
        ):
            raise IoError(
                f"[checkpoint] {what}, {key!r} is damaged, or of another optimizer than a {type(base).__name__}: "
                f"{value!r:.40} in the place of a tensor of shape {tuple(held_here.shape)}"
            )
    missing = sorted(present.keys() - state.keys()) if state and _makes_all_at_once(base) else []
    if missing:
        raise IoError(
            f"[checkpoint] {what} is damaged, or of another optimizer than a {type(base).__name__}: it has no "
            f"'{missing[0]}'. Load another tag, or pass load_optimizer_states=False"
        )
    return {key: _number_like(value, present.get(key)) for key, value in state.items()}


def _number_like(value: Any, present: Any) -> Any:
    """A number in the form that `present` has; all else as it is."""
    if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor) and present.numel() == value.numel() == 1:
        return value.to(present).view_as(present)
    value = _of_kind(value, present)
    return int(value) if type(present) is int and isinstance(value, float) else value


def _makes_all_at_once(base: torch.optim.Optimizer) -> bool:
    return type(base).__module__.startswith(("torch.optim.", "tessera.optim."))


def put_states(run: Run, states: dict[int, dict[str, Any]]) -> None:
    runner = run._updates.runner
    assert isinstance(runner, ExternalRunner)
    for number, _, target in runner.targets:
        if states.get(number):
            runner.base.state[target] = states[number]
        else:
            runner.base.state.pop(target, None)
    # C++ counts steps in numbers, torch's classes in tensors: each knows how it takes another's.
    counts = any(isinstance(state.get("step"), int) for state in states.values())
    if counts and type(runner.base).__module__.startswith("torch.optim."):
        runner.base.__setstate__({"state": runner.base.state, "param_groups": runner.base.param_groups})


# ---------------------------------------------------------------- param groups


@dataclass
class SavedGroup:
    number: int
    values: dict[str, Any]


def groups_from(run: Run, saved: Saved, reader: _core.CheckpointReader) -> list[SavedGroup | None] | None:
    """Returns for each param group of this optimizer the checkpoint's group that has its parameters; None where there
    is none. None as a whole: a run of C++. ConfigError where parameters of one group come from several groups whose
    values differ."""
    values = saved.param_groups()
    if values is None or run.basic_optimizer is None:
        return None
    there = [SavedGroup(number, of) for number, of in enumerate(values)]
    here = [[name for name, _ in group] for group in run._updates.group_names]
    names = saved.group_names()
    if names is None or len(names) != len(there):
        if len(there) != len(here):
            raise ConfigError(
                f"[engine.load_checkpoint] the checkpoint has {len(there)} param groups and does not say of which "
                f"parameters, this optimizer has {len(here)}: {_ADVICE}"
            )
        return list(there)
    own = {alias: param.name for param in reader.params() for alias in (param.name, *param.aliases)}
    of = {own.get(name, name): there[number] for number, group in enumerate(names) for name in group}
    result: list[SavedGroup | None] = []
    for number, group in enumerate(here):
        found = {name: of[own.get(name, name)] for name in group if own.get(name, name) in of}
        first = next(iter(found.values()), None)
        for name, other in found.items():
            if first is not None and other is not first and not _equal(other.values, first.values):
                raise ConfigError(
                    f"[engine.load_checkpoint] param group {number} here has '{next(iter(found))}', which is of group "
                    f"{first.number} there, and '{name}', which is of group {other.number} with other values: {_ADVICE}"
                )
        result.append(first)
    taken = {group.number for group in result if group is not None}
    # A group whose parameters the checkpoint lacks, or that has none, takes the checkpoint's group of its own number.
    return [
        there[n] if group is None and n < len(there) and n not in taken else group for n, group in enumerate(result)
    ]


def check_groups(run: Run, saved: list[SavedGroup | None] | None) -> None:
    """IoError for a value that is of another kind than the group's, no number, or beyond what it can be."""
    for group, of in zip(_groups_of(run), saved or (), strict=False):
        for key, value in _taken(group, of):
            what = f"'param_groups', '{key}' of group {of.number if of else 0}"
            check_like(value, _present(group, key), what, finite=True)
            _check_range(key, value, _present(group, key), what)


def _check_range(key: str, value: Any, present: Any, what: str) -> None:
    """IoError for what no optimizer that has `present` there was built with."""
    pairs = zip(value, present, strict=False) if key == "betas" and present else [(value, present)]
    for one, other in pairs:
        could_be = isinstance(other, (int, float)) and not _core.wrong_field(key, other)
        if could_be and (wrong := _core.wrong_field(key, one)):
            raise IoError(f"[checkpoint] {what} is damaged: {one!r:.40} {wrong}")


def _groups_of(run: Run) -> list[dict[str, Any]]:
    return [] if run.basic_optimizer is None else run.basic_optimizer.param_groups


def _taken(group: dict[str, Any], of: SavedGroup | None) -> list[tuple[str, Any]]:
    """The values that a group takes of a saved one."""
    values = {} if of is None else of.values
    return [(key, value) for key, value in values.items() if key in group or key.startswith("initial_")]


def _present(group: dict[str, Any], key: str) -> Any:
    return group.get("lr") if key == "initial_lr" else group.get(key)


_ADVICE = (
    "make the groups as they were when it was saved, or pass load_optimizer_states=False and set their values yourself"
)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return bool(a == b)


def _of_kind(value: Any, present: Any) -> Any:
    """A number as a tensor where `present` is one, else as a number."""
    if isinstance(present, torch.Tensor) and present.numel() == 1 and isinstance(value, (int, float)):
        return torch.full_like(present, value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and isinstance(present, (int, float)):
        return value.item()
    if isinstance(value, (list, tuple)) and isinstance(present, (list, tuple)) and len(value) == len(present):
        return type(value)(_of_kind(one, other) for one, other in zip(value, present, strict=True))
    return value


def put_groups(run: Run, saved: list[SavedGroup | None] | None) -> None:
    if run.basic_optimizer is None:
        return
    groups = run.basic_optimizer.param_groups
    if saved is None:
        for group, options in zip(groups, run.core.groups(), strict=False):
            values: dict[str, Any] = {**_core.group_fields(options), "betas": (options.beta1, options.beta2)}
            if isinstance(run._updates.runner, ExternalRunner):  # of which the core has the rates only
                values = {"lr": options.lr}
            group.update({key: _of_kind(value, group[key]) for key, value in values.items() if key in group})
        return
    for group, of in zip(groups, saved, strict=True):
        taken = [(key, _of_kind(value, _present(group, key))) for key, value in _taken(group, of)]
        group.update(taken)


def steps_of(schedule: Any) -> int | None:
    """How many steps a schedule has made, where it says it."""
    if (iteration := getattr(schedule, "last_batch_iteration", None)) is not None:
        return int(iteration) + 1
    return schedule.last_epoch if isinstance(schedule, LRScheduler) else None


def schedule_from(run: Run, saved: Any, groups: list[SavedGroup | None] | None) -> Any:
    """The state that the schedule here shall take of a saved one. IoError where it cannot; the schedule is as
    before."""
    schedule: Any = run.lr_scheduler  # one of a user's own may have less than a Scheduler
    if not hasattr(schedule, "load_state_dict"):
        return saved
    state = saved if groups is None else _schedule_for(saved, groups, run)
    present = schedule.state_dict() if hasattr(schedule, "state_dict") else None
    if isinstance(present, dict):
        check_like(state, present, "'schedule'")
        for key in _COUNTS & present.keys() - state.keys():
            raise IoError(
                f"[checkpoint] 'schedule' is damaged, or of another schedule than a {type(schedule).__name__}: it has "
                f"no '{key}'. Load another tag, or pass load_lr_scheduler_states=False"
            )
    # CyclicLR takes a part out of what it is given.
    check_taken("'schedule'", schedule, schedule.load_state_dict, copy.copy(state), present)
    return state


def put_schedule(run: Run, saved: Any, values: dict[str, Any]) -> None:
    """`saved`: of schedule_from(), None where there is none."""
    schedule: Any = run.lr_scheduler
    if not hasattr(schedule, "load_state_dict"):
        return
    if saved is not None:
        schedule.load_state_dict(copy.copy(saved))
    elif "schedule_steps" in values and hasattr(schedule, "last_batch_iteration"):
        schedule.load_state_dict({"last_batch_iteration": values["schedule_steps"] - 1})
    elif "schedule_steps" in values and isinstance(schedule, _OF_STEPS_ALONE):
        steps = values["schedule_steps"]
        own = schedule.optimizer.param_groups
        for group, of in zip(own, run.core.groups(), strict=False):  # they compute a rate of the last one
            group["lr"] = _of_kind(of.lr, group["lr"])
            _put_momentum(group, of)
        rates = [group["lr"] for group in own]
        schedule.load_state_dict(schedule.state_dict() | _at_step(schedule, steps) | {"_last_lr": rates})
    rates_saved = any("lr" in group for group in values.get("groups", []))
    if not rates_saved and hasattr(schedule, "apply_last"):  # some of DeepSpeed's files lack them
        schedule.apply_last()


def _put_momentum(group: dict[str, Any], of: Any) -> None:
    """The momentum of the next step, which some schedules move."""
    if "betas" in group:
        group["betas"] = (of.beta1, *group["betas"][1:])
    elif "momentum" in group:
        group["momentum"] = of.momentum


def _at_step(schedule: LRScheduler, steps: int) -> dict[str, Any]:
    """What a schedule of steps alone has after so many."""
    state: dict[str, Any] = {"last_epoch": steps, "_step_count": steps + 1}
    if isinstance(schedule, lr_scheduler.CosineAnnealingWarmRestarts):
        done, length = (steps % schedule.T_0 if schedule.T_mult == 1 else steps), schedule.T_0
        while done >= length:
            done, length = done - length, length * schedule.T_mult
        state |= {"T_cur": done, "T_i": length}
    return state


def _schedule_for(saved: Any, groups: list[SavedGroup | None], run: Run) -> Any:
    """The state of a schedule with what it has by param group in the order of the groups here, and of their kind."""
    if isinstance(saved, list):
        return [_schedule_for(one, groups, run) for one in saved]
    if not isinstance(saved, dict) or run.basic_optimizer is None:
        return saved
    rates = [group.get("lr") for group in run.basic_optimizer.param_groups]
    numbers = [n if group is None else group.number for n, group in enumerate(groups)]
    state = dict(saved)
    for key, value in saved.items():
        if key == "_schedulers":
            state[key] = _schedule_for(value, groups, run)
        elif key in _OF_GROUPS and isinstance(value, (list, tuple)) and max(numbers, default=0) < len(value):
            state[key] = type(value)(_of_kind(value[n], rate) for n, rate in zip(numbers, rates, strict=True))
    return state
