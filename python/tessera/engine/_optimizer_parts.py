"""What a checkpoint has of the optimizer beside the core's tensors: states of an optimizer that runs itself, values of
param groups, the schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tessera import _core
from tessera._blobs import Saved
from tessera.errors import ConfigError
from tessera.optim._runners import ExternalRunner

if TYPE_CHECKING:
    from tessera.engine._engine import Engine

# Kinds of tensors that are no optimizer's states.
OWN_KINDS = frozenset({"weight", "master", "buffer", "gradient", "partial_gradient"})
# A param group's values that the core has by the same name, for runs that were saved from C++; "betas" beside them.
_FROM_CORE = ("lr", "eps", "weight_decay", "momentum", "dampening", "nesterov", "lr_decay")
# In the blob "optimizer-N", beside the states of a parameter: which elements of it they are of.
_CUT = "tessera.cut"
# Of schedules of torch: lists with one entry for each param group.
_OF_GROUPS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


# ---------------------------------------------------------------- states of a client's optimizer


def client_states(engine: Engine, names: dict[int, str]) -> tuple[dict[str, Any], list[tuple[int, str, torch.Tensor]]]:
    """Of an optimizer that runs itself: what is not a value for each element of this rank's part, by parameter, and
    what is."""
    numbers: dict[str, Any] = {}
    states: list[tuple[int, str, torch.Tensor]] = []
    runner = engine._runner
    if not isinstance(runner, ExternalRunner):
        return numbers, states
    for number, param, target in runner.targets:
        name = names[id(param)]
        for key, value in runner.base.state.get(target, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == target.shape:
                if key in OWN_KINDS:
                    raise ConfigError(f"[engine.save_checkpoint] an optimizer state cannot be named {key!r}")
                states.append((number, key, value))
            else:
                numbers.setdefault(name, {})[key] = value
    return numbers, states


def states_from(
    engine: Engine, restore: _core.Restore, saved: Saved, names: dict[int, str]
) -> dict[int, dict[str, Any]] | None:
    """By number of the parameter: what the client's optimizer shall have. None for one of the core's."""
    runner = engine._runner
    if not isinstance(runner, ExternalRunner):
        return None
    reader = saved.reader
    kinds = sorted({kind for _, kind, *_ in reader.tensors()} - OWN_KINDS)
    own = f"optimizer-{_core.checkpoint_place(engine.core)}"
    numbers: dict[str, dict[str, Any]] = {}
    for name in sorted(saved.names, key=lambda blob: (blob == own, blob)):  # this rank's own last: it holds
        if name.startswith("optimizer-"):
            numbers.update(saved.blob(name))
    records = {alias: p for p in reader.params() for alias in (p.name, *p.aliases)}
    result: dict[int, dict[str, Any]] = {}
    for number, param, target in runner.targets:
        record = records.get(names[id(param)])
        if record is None:
            continue
        state = dict(numbers.get(record.name, {}))
        for kind in kinds:
            part = restore.client_state(number, kind)
            if part is not None:
                state[kind] = part.to(target.device).as_strided(target.shape, target.stride())
        if state and "step" not in state and record.step > 0:
            state["step"] = torch.tensor(float(record.step))
        result[number] = state
    return result


def put_states(engine: Engine, states: dict[int, dict[str, Any]]) -> None:
    runner = engine._runner
    assert isinstance(runner, ExternalRunner)
    for number, _, target in runner.targets:
        if states.get(number):
            runner.base.state[target] = states[number]
        else:
            runner.base.state.pop(target, None)


# ---------------------------------------------------------------- param groups


def groups_from(engine: Engine, saved: Saved) -> list[dict[str, Any]] | None:
    """By param group here: its values in the checkpoint."""
    return saved.part("param_groups")


def put_groups(engine: Engine, saved: list[dict[str, Any]] | None) -> None:
    if engine.basic_optimizer is None:
        return
    groups = engine.basic_optimizer.param_groups
    if saved is not None:
        for group, values in zip(groups, saved, strict=False):
            group.update({key: value for key, value in values.items() if key in group or key.startswith("initial_")})
        return
    for group, options in zip(groups, engine.core.groups(), strict=False):
        values = {key: getattr(options, key) for key in _FROM_CORE} | {"betas": (options.beta1, options.beta2)}
        group.update({key: value for key, value in values.items() if key in group})


def put_schedule(engine: Engine, saved: dict[str, Any] | None, run: dict[str, Any], groups: Any) -> None:
    schedule = engine.lr_scheduler
    if not hasattr(schedule, "load_state_dict"):
        return
    if saved is not None:
        schedule.load_state_dict(saved)
    elif "schedule_steps" in run and hasattr(schedule, "last_batch_iteration"):
        schedule.load_state_dict({"last_batch_iteration": run["schedule_steps"] - 1})
    rates_saved = any("lr" in group for group in run.get("groups", []))
    if not rates_saved and hasattr(schedule, "apply_last"):  # some of DeepSpeed's files lack them
        schedule.apply_last()
