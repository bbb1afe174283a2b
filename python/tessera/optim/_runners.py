"""How an engine runs an optimizer: on the core's kernels (NativeRunner), or by calling the client's own step() on the
master weights (ExternalRunner)."""

from __future__ import annotations

import json
import math
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from tessera import _core
from tessera._blobs import CUT
from tessera.errors import ConfigError, IoError, UsageError
from tessera.optim import _parts
from tessera.optim._rules import NativeRule, device_terms, note_group, other_names, other_terms, read_group
from tessera.optim._state_view import StateView, shaped_like
from tessera.optim._states import OptimizerStates, OwnStates
from tessera.optim._whole import WholeOptimizer

_ELSEWHERE = "[optimizer] another rank could not take the optimizer's states, and says why"
_NUMBERS: dict[str, type] = {"bool": bool, "int": int, "float": float}
_SIZE = torch.Tensor.size  # whatever a class of parameters shows as its size


class Runner:
    """The calls by which Engine.step() runs an optimizer. `base` is the torch optimizer whose param_groups rule."""

    base: torch.optim.Optimizer
    states: OptimizerStates
    _known: list[list[torch.Tensor]]  # parameters of the param groups when the runner last looked

    @property
    def external(self) -> Callable[[], None] | None:
        """The update that the core calls in place of its own; None: the core updates."""
        return None

    def before_step(self) -> None:
        """Called before every step at a boundary."""
        self.check_kept()
        self.publish_groups()

    def publish_groups(self) -> None:
        """The core has the present hyper-parameters from here on."""

    def check_kept(self) -> None:
        """UsageError where something was taken out of the param groups, or is elsewhere in them."""
        if not self._kept():
            raise UsageError(
                "[engine] param groups of the optimizer, or parameters in them, were removed, exchanged or put in "
                "another order after the engine was built; put them back and freeze what is not to be trained "
                "(requires_grad False), or destroy() the engine and call tessera.initialize again with the others"
            )

    def has_grown(self) -> bool:
        """Whether there are parameters, or groups, that it does not know of, and nothing is missing: check_kept()."""
        return not self._is_known() and self._kept() and (self._has_groups() or any(new for _, new in self.grown()))

    def _has_groups(self) -> bool:
        return len(self.base.param_groups) > len(self._known)

    def _is_known(self) -> bool:
        groups = self.base.param_groups
        return len(groups) == len(self._known) and all(
            len(group["params"]) == len(known) and all(map(operator.is_, group["params"], known))
            for group, known in zip(groups, self._known, strict=True)
        )

    def _kept(self) -> bool:
        if self._is_known():
            return True
        ids = [{id(param) for param in group["params"]} for group in self.base.param_groups]
        return len(ids) >= len(self._known) and all(
            there.issuperset(map(id, known)) for there, known in zip(ids, self._known, strict=False)
        )

    def grown(self) -> list[tuple[int, list[torch.Tensor]]]:
        """These parameters, by the number of their group."""
        groups = self.base.param_groups
        known = [{id(param) for param in params} for params in self._known]
        known += [set() for _ in groups[len(known) :]]
        return [(n, [p for p in g["params"] if id(p) not in known[n]]) for n, g in enumerate(groups)]

    def options_of(self, number: int) -> _core.GroupOptions:
        """The options of a group that the core does not have yet."""
        raise NotImplementedError

    def take_group(self, number: int, params: list[torch.Tensor]) -> None:
        """The core has the group with this number, too, which got these parameters."""
        raise NotImplementedError

    def note_params(self) -> None:
        """Notes all parameters that the optimizer has now as known to the runner."""
        self._known = [list(group["params"]) for group in self.base.param_groups]

    def numbers(self, index: Mapping[int, int]) -> dict[int, int]:
        """Numbers of the parameters in the param groups, by id: `index` has those of the module's parameters."""
        return dict(index)

    def joined(self, number: int, param: torch.Tensor, group: int) -> None:
        """The core trains `param`, of this group, from here on."""
        raise NotImplementedError

    def after_step(self, applied: bool) -> None:
        """Called after the step."""

    def gather(self, numbers: Collection[int]) -> dict[int, dict[str, Any]]:
        """Returns the whole states of these parameters, by their numbers in the core, for release(). Those that cannot
        be whole are left out. Collective."""
        raise NotImplementedError

    def release(self, cut: bool, whole: Mapping[int, dict[str, Any]]) -> None:
        """Gives the optimizer back to its owner, with the states of gather(), and with this rank's of other parameters:
        where they are `cut` these are parts (optim/_parts.py)."""
        raise NotImplementedError

    def _gathered(self, number: int, param: torch.Tensor, keys: Iterable[str]) -> dict[str, Any] | None:
        state = {}
        for key in keys:
            value = self.states.get_full(number, key)
            if value is None or (value.dim() > 0 and value.shape != _SIZE(param)):
                return None  # the model is cut, too
            state[key] = value.clone() if value.dim() == 0 else value.to(param.device, copy=True)
        return state


class NativeRunner(Runner):
    """The core updates; base.param_groups gives the hyper-parameters and base.state shows the states."""

    def __init__(
        self, core: _core.Engine, base: torch.optim.Optimizer, rule: NativeRule, index: Mapping[int, int]
    ) -> None:
        self.base = base
        self._core = core
        self._rule = rule
        self.note_params()
        self._groups = core.groups()
        params = [p for group in base.param_groups for p in group["params"] if id(p) in index]
        names = _core.state_names(rule.rule, self._groups)
        self.states = _core.OptimizerStates(core)
        self._view = StateView(core, params, index, names, rule)
        self._loading: Mapping[str, Any] | None = None
        _parts.warn_of_ended(core, base.state.values())
        self._adopt_on_all(base.state)
        this = weakref.ref(self)
        self._hooks = [
            base.register_load_state_dict_pre_hook(lambda _, loaded: _call(this, "_before_load", loaded)),
            base.register_load_state_dict_post_hook(lambda _: _call(this, "_after_load")),
        ]

    def _adopt_on_all(self, state: Mapping[Any, Any]) -> None:
        """Adopts states: an error of one rank is an error on all, and so are states of other steps. Collective."""
        problem: Exception | None = None
        steps = 0.0
        try:
            self._adopt(state)
            steps = float(sum(self._core.param_step(index) * (1 + index) for index in self._view.indices()))
        except Exception as error:
            problem = error
        most, least = self._core.agree_max(steps if problem is None else math.inf), -self._core.agree_max(-steps)
        if problem is not None:
            raise problem
        if most == math.inf:
            raise IoError(_ELSEWHERE)
        if most != least:
            raise ConfigError(
                "[optimizer] the ranks' optimizers bring states of different steps: step them alike on all ranks "
                "before the engine is made, or load a checkpoint after"
            )

    def _adopt(self, state: Mapping[Any, Any]) -> None:
        """Takes states from plain dicts, and shows the runner's own in their place."""
        for param in list(state):
            if self._view.manages(param) and state[param]:
                self._view[param] = state[param]
        self.base.state = self._view  # type: ignore[assignment]

    def _before_load(self, loaded: Mapping[str, Any]) -> None:
        self._loading = loaded

    def _after_load(self) -> None:
        """torch has made copies in the dtype of the parameters; the exact values are in what was loaded."""
        loaded, self._loading = self._loading, None
        if loaded is None:
            return
        saved = [key for group in loaded["param_groups"] for key in group["params"]]
        params = [param for group in self.base.param_groups for param in group["params"]]
        states = {
            param: loaded["state"][key] for key, param in zip(saved, params, strict=True) if key in loaded["state"]
        }
        for param in list(self._view):
            if param not in states:
                del self._view[param]
        self._adopt(states)

    def options_of(self, number: int) -> _core.GroupOptions:
        options = _core.GroupOptions()
        read_group(self._rule, self.base, number, options)
        return options

    def take_group(self, number: int, params: list[torch.Tensor]) -> None:
        self._groups = self._core.groups()

    def joined(self, number: int, param: torch.Tensor, group: int) -> None:
        self._view.add(param, number)
        self.note_params()

    def before_step(self) -> None:
        self.check_kept()
        if self.base.state is not self._view:  # the client put another one there
            self._adopt(self.base.state)
        self.publish_groups()
        for hook in self.base._optimizer_step_pre_hooks.values():
            hook(self.base, (), {})

    def publish_groups(self) -> None:
        for index, options in enumerate(self._groups):
            read_group(self._rule, self.base, index, options)
            self._core.set_group(index, options)

    def after_step(self, applied: bool) -> None:
        if applied:
            self.base._opt_called = True  # type: ignore[attr-defined]  # schedulers of torch look at it
            for hook in self.base._optimizer_step_post_hooks.values():
                hook(self.base, (), {})

    def gather(self, numbers: Collection[int]) -> dict[int, dict[str, Any]]:
        keys = [*(["step"] if self._rule.counts_steps else []), *self._view.names]
        found = {}
        for param in self._view if self.base.state is self._view else ():
            number = self._view.number(param)
            state = self._gathered(number, param, keys) if number in numbers else None
            if state is not None:
                found[number] = state
        return found

    def release(self, cut: bool, whole: Mapping[int, dict[str, Any]]) -> None:
        for hook in self._hooks:
            hook.remove()
        if self.base.state is not self._view:
            return
        memory = self._core.memory()
        # Because they have no room here. (Parameters may be away, too.)
        away = self._core.states_are_away() or memory.host + memory.disk > memory.params
        self.base.state = defaultdict(dict)  # also where there is no memory for copies
        states = {}
        for param in self._view:
            number = self._view.number(param)
            states[param] = whole[number] if number in whole else {} if away else self._view.copied(param)
            if number not in whole and (cut or away):
                states[param][CUT] = _parts.part_of(self._core, number)
        _parts.leave(self.base, states)


def _call(reference: weakref.ref[NativeRunner], method: str, *args: Any) -> None:
    runner = reference()
    if runner is not None:
        getattr(runner, method)(*args)


class ExternalRunner(Runner):
    """The client's optimizer updates: the module's own parameters where they are the masters and whole, else fp32
    masters that take the parameters' places in param_groups (this rank's slices, empty ones left out)."""

    states: OwnStates

    def __init__(
        self, core: _core.Engine, base: torch.optim.Optimizer, index: Mapping[int, int], on_params: bool
    ) -> None:
        self.base = base
        self._core = core
        self._groups = core.groups()
        self._originals = [list(group["params"]) for group in base.param_groups]
        # (number in the core, the parameter, the tensor that is updated)
        self._masters: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._on_params = on_params
        self._step = base.step  # the owner's, before Engine puts its own there
        self._brings_states = len(base.state) > 0
        _parts.warn_of_ended(core, base.state.values())
        self._take_params(index)
        self.note_params()
        self._names = [other_names(group) for group in base.param_groups]
        self.states = OwnStates(core, base, {number: target for number, _, target in self._masters})

    def _take_params(self, index: Mapping[int, int]) -> None:
        """Puts targets into the param groups: an error of one rank is an error on all. Collective."""
        problem: Exception | None = None
        try:
            for group in self.base.param_groups:
                targets = [self._target(param, index) for param in group["params"]]
                group["params"] = [target for target in targets if target is not None]
        except Exception as error:
            problem = error
        failed = self._core.agree_max(0.0 if problem is None else 1.0) > 0
        if problem is not None:
            raise problem
        if failed:
            raise IoError(_ELSEWHERE)

    @property
    def external(self) -> Callable[[], None]:
        return self.run

    @property
    def targets(self) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """(number in the core, the parameter, the tensor that is updated) of what this rank has a part of."""
        return self._masters

    def _target(self, param: torch.Tensor, index: Mapping[int, int]) -> torch.Tensor | None:
        number = index.get(id(param))
        if number is None or self._on_params:
            if number is not None:
                self._masters.append((number, param, param))
                self._cut_states(param, number)
            return param
        view = self._core.local_view(number, _core.Quantity.Master)
        state = _parts.taken(self._core, number, self.base.state.pop(param, {}))
        if view is None or view.numel() == 0:
            return None
        master = view.detach().requires_grad_(True)
        self._masters.append((number, param, master))
        if state:
            self.base.state[master] = {
                name: self._slice_like(name, value, master, number) for name, value in state.items()
            }
        return master

    def options_of(self, number: int) -> _core.GroupOptions:
        return _core.GroupOptions()

    def take_group(self, number: int, params: list[torch.Tensor]) -> None:
        self._groups = self._core.groups()
        if number == len(self._originals):
            self._originals.append([])
            self._names.append(other_names(self.base.param_groups[number]))
        known = {id(param) for param in self._originals[number]}
        self._originals[number] += [param for param in params if id(param) not in known]

    def joined(self, number: int, param: torch.Tensor, group: int) -> None:
        listed = self.base.param_groups[group]["params"]
        place = next(place for place, other in enumerate(listed) if other is param)
        target = self._target(param, {id(param): number})
        listed[place : place + 1] = [] if target is None else [target]
        if not any(param is other for other in self._originals[group]):
            self._originals[group].append(param)
        self.note_params()
        if target is not None:
            self._took(number, param, target)

    def numbers(self, index: Mapping[int, int]) -> dict[int, int]:
        return {**index, **{id(target): number for number, _, target in self._masters}}

    def _took(self, number: int, param: torch.Tensor, target: torch.Tensor) -> None:
        self.states.add(number, target)

    def publish_groups(self) -> None:
        for index, (group, options) in enumerate(zip(self.base.param_groups, self._groups, strict=True)):
            note_group(group, options)
            self._core.set_group(index, options)
            if isinstance(self.base, WholeOptimizer):
                self.base.check_group(index, group)
        lines, on_device = [], []
        for index, (group, names) in enumerate(zip(self.base.param_groups, self._names, strict=True)):
            lines += other_terms(group, index, names)
            on_device += device_terms(group, index, names)
        self._core.set_client_terms(lines, on_device)

    def run(self) -> None:
        for number, _, master in self._masters:
            master.grad = self._core.local_view(number, _core.Quantity.Gradient)
        self._step()
        for _, _, master in self._masters:
            if not self._on_params:
                master.grad = None

    def _cut_states(self, param: torch.Tensor, number: int) -> None:
        """States from before the model was cut."""
        state = _parts.taken(self._core, number, self.base.state.get(param, {}))
        if state:
            self.base.state[param] = state
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape != _SIZE(param) and self._is_of(value, number):
                state[name] = self._core.local_part(number, value.detach()).view(_SIZE(param)).clone()

    def _is_of(self, value: torch.Tensor, number: int) -> bool:
        """Whether the value has one element for each of the parameter, and is no number."""
        return value.dim() > 0 and list(value.shape) == self._core.param(number).whole_sizes

    def _slice_like(self, key: str, value: Any, master: torch.Tensor, number: int) -> Any:
        if isinstance(value, torch.Tensor):
            one = _core.ClientStates.part_of_number(key, value, self._core.param(number).whole_sizes, master)
            if one.shape != value.shape:
                return one.float().clone()
        tensor = isinstance(value, torch.Tensor) and value.dim() > 0
        part = _parts.part_in(self._core, number, value.detach()) if tensor else None
        return value if part is None else part.float().view(master.shape).clone()

    def gather(self, numbers: Collection[int]) -> dict[int, dict[str, Any]]:
        """A rank that has no part of a parameter gets its states from the others. Collective."""
        kinds = {
            number: {key: type(value).__name__ for key, value in self.base.state.get(target, {}).items()}
            for number, _, target in self._masters
        }
        of_all: dict[int, dict[str, str]] = {}
        for text in _core.checkpoint_exchange(self._core, json.dumps(list(kinds.items())), ""):
            for number, keys in json.loads(text):
                of_all.setdefault(number, {}).update(keys)
        found = {}
        for number in sorted(of_all.keys() & numbers):
            try:
                state = self._gathered(number, self._core.param(number).tensor, sorted(of_all[number]))
            except ConfigError:  # on all ranks: neither numbers nor one value for each element
                continue
            if state is not None:
                kinds_of = of_all[number]
                found[number] = {
                    key: _NUMBERS[kinds_of[key]](value.item()) if kinds_of[key] in _NUMBERS else value
                    for key, value in state.items()
                }
        return found

    def release(self, cut: bool, whole: Mapping[int, dict[str, Any]]) -> None:
        groups = self.base.param_groups
        if self._is_known():
            for group, params in zip(groups, self._originals, strict=True):
                group["params"] = params
        else:  # the client changed them
            param_of = {id(master): param for _, param, master in self._masters}
            for group in groups:
                group["params"] = [param_of.get(id(param), param) for param in group["params"]]
        states: dict[torch.Tensor, dict[str, Any]] = {}
        for _, param, master in self._masters:
            state = None if self._on_params else self.base.state.pop(master, None)
            if state:
                states[param] = {name: shaped_like(value, param) for name, value in state.items()}
        stepped = self._brings_states or self._core.global_steps() > 0
        for number, spec in enumerate(self._core.params() if cut else ()):
            if number in whole:
                states[spec.tensor] = whole[number]
            elif spec.group >= 0 and (spec.tensor in states or stepped):
                states.setdefault(spec.tensor, {})[CUT] = _parts.part_of(self._core, number)
        _parts.leave(self.base, states)
