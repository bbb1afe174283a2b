"""Parameters that begin to be trained after their engine was built: frozen ones that require gradients, and those that
are added to the optimizer's param groups. The core lets them join (Note [Joining] in zero/joining.h); this module hands
them to the core, and what has joined to the client's optimizer."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

import torch
from torch import nn

from tessera import _core
from tessera.engine._on_all import on_all
from tessera.engine._updates import Updates
from tessera.errors import ConfigError, UsageError
from tessera.optim.engines import Muon, Runner, is_matrix
from tessera.units import ROOT
from tessera.zero.engines import Partition, early_of


class HasModule(Protocol):
    """An engine, whose module a user may exchange."""

    @property
    def module(self) -> nn.Module: ...
    def _warn_user(self, lines: list[str]) -> None: ...


def groups_of_frozen(
    model: nn.Module, base: torch.optim.Optimizer | None, given: list[Any] | None, own: bool
) -> dict[int, int]:
    """The param group that each frozen parameter, by id, joins once it requires gradients: the optimizer's group that
    has it. An optimizer that the engine has made (`own`) of `given` (model_parameters) has only parameters that are
    trained from the start: a frozen one joins the group of those beside it in `given`, where these are all in one
    group."""
    if base is None:
        return {}
    group_of = {id(param): number for number, group in enumerate(base.param_groups) for param in group["params"]}
    joins = {id(p): group_of[id(p)] for group in base.param_groups for p in group["params"] if not p.requires_grad}
    for members in _given_groups(model, given) if own else []:
        for frozen in (p for p in members if not p.requires_grad):
            groups = {group_of[id(p)] for p in members if id(p) in group_of}
            groups = {number for number in groups if _fits(base, base.param_groups[number], model, frozen)}
            if len(groups) == 1:
                joins.setdefault(id(frozen), *groups)
    return joins


def _given_groups(model: nn.Module, given: list[Any] | None) -> list[list[torch.Tensor]]:
    if given is None:
        return [list(model.parameters())]
    lists = [one["params"] for one in given if isinstance(one, dict)] or [given]
    return [[item[1] if isinstance(item, tuple) else item for item in items] for items in lists]


def _fits(base: torch.optim.Optimizer, group: dict[str, Any], model: nn.Module, param: torch.Tensor) -> bool:
    if not isinstance(base, Muon):
        return True
    name = next((name for name, own in model.named_parameters() if own is param), "")
    return bool(is_matrix(param, name) == group["use_muon"])


class Joining:
    """The engine's part in joining. `partition`: marks parameters as the engine's."""

    def __init__(self, engine: HasModule, updates: Updates, partition: Partition) -> None:
        self._engine, self._updates, self._partition = engine, updates, partition
        self._core = updates.core

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Does optimizer.add_param_group(). With a group that is refused all is as before."""
        base = self._updates.trained_by("optimizer.add_param_group").base
        count = len(base.param_groups)
        type(base).add_param_group(base, group)
        try:
            self.follow()
        except BaseException as error:
            del base.param_groups[count:]
            if isinstance(error, (ConfigError, UsageError)):
                strangers = _strangers(self._engine.module, group)
                raise type(error)(f"{error}; the param group was not added{strangers}") from None
            raise

    def follow(self) -> None:
        """The core learns of what begins to be trained. Local."""
        runner = self._updates.runner
        if runner is not None and runner.has_grown():
            self._take_groups(runner)
        self._engine._warn_user(self._core.take_notices())

    def settle(self) -> None:
        """The optimizer has what the core has let join since the last call."""
        numbers, runner = self._core.take_joined(), self._updates.runner
        if not numbers or runner is None:
            return
        groups = runner.base.param_groups
        for number in numbers:
            spec = self._core.param(number)
            listed = groups[spec.group]["params"]
            if not any(param is spec.tensor for param in listed):
                number_of = runner.numbers(self._updates.index)
                listed.insert(_place([number_of.get(id(p), -1) for p in listed], number), spec.tensor)
            _rename(self._updates, spec, number)
            runner.joined(number, spec.tensor, spec.group)
        self._updates.optimized |= frozenset(numbers)

    def join(self) -> None:
        """Joins before a save or a load. Collective, over all engines that save together."""
        with on_all(self._core):
            if self._updates.runner is not None:
                self._updates.runner.check_kept()
            self.follow()
        with on_all(self._core):
            self._core.join()
            self.settle()

    def _take_groups(self, runner: Runner) -> None:
        core, updates = self._core, self._updates
        grown = runner.grown()
        groups = {number: runner.options_of(number) for number, _ in grown if number >= len(core.groups())}
        joining = self._joining(runner, grown)
        known = [number for number in (updates.index.get(id(param)) for param, _ in joining) if number is not None]
        specs = self._specs([(param, group) for param, group in joining if id(param) not in updates.index])
        core.check_addition(list(groups.values()), specs, known)
        for options in groups.values():
            core.add_group(options)
        for spec in specs:
            updates.index[id(spec.tensor)] = number = core.add_param(spec)
            self._partition.take(spec.tensor, number)
        for number, params in grown:
            runner.take_group(number, params)
            updates.group_names += [[] for _ in range(number + 1 - len(updates.group_names))]
        for param, group in joining:
            number = updates.index[id(param)]
            core.set_joins(number, group)
            updates.group_names[group].append((core.param(number).name, False))
        runner.note_params()

    def _joining(self, runner: Runner, grown: list[tuple[int, list[torch.Tensor]]]) -> list[tuple[torch.Tensor, int]]:
        """Parameters that have come, with their groups."""
        listed = Counter(id(p) for group in runner.base.param_groups for p in group["params"])
        joining = [(param, group) for group, params in grown for param in params]
        for param, group in joining:
            if self._updates.optimizes(param) or listed[id(param)] > 1:
                named = self._engine.module.named_parameters()
                name = next((name for name, p in named if p is param), "a parameter")
                raise UsageError(
                    f"[engine] '{name}' was added to param group {group}, and is in another one: change the rates "
                    "of that one"
                )
        return joining

    def _specs(self, joining: list[tuple[torch.Tensor, int]]) -> list[_core.ParamSpec]:
        """Specs of parameters that the engine has not seen: those of a module that came later, or of none."""
        names = {id(param): name for name, param in self._engine.module.named_parameters()}
        first = len(self._core.params())
        return [
            _core.ParamSpec(
                names.get(id(param), f"optimizer.{first + number}"), param, -1, ROOT, *early_of(param), joins=group
            )
            for number, (param, group) in enumerate(joining)
        ]


def _place(numbers: list[int], number: int) -> int:
    """The place in a group of a parameter as if it had been there from the start."""
    return next((place for place, other in enumerate(numbers) if other > number), len(numbers))


def _rename(updates: Updates, spec: _core.ParamSpec, number: int) -> None:
    group = updates.group_names[spec.group]
    if (spec.name, False) in group:
        group[group.index((spec.name, False))] = (spec.name, True)
        return
    number_of = {other.name: n for n, other in enumerate(updates.core.params())}
    group.insert(_place([number_of[name] for name, _ in group], number), (spec.name, True))


def _strangers(module: nn.Module, group: dict[str, Any]) -> str:
    """A text on parameters that have no name in the model, by their shapes."""
    named = {id(param) for param in module.parameters()}
    others = [tuple(param.shape) for param in group["params"] if id(param) not in named]
    return f"; no module of the model has its parameters of the shapes {others}" if others else ""
