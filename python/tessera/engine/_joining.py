"""Parameters that begin to be trained after their engine was built: frozen ones that require gradients, and what is
added to the optimizer's param groups. The core lets them join (Note [Joining] in zero/joining.h); here it is told of
them, and the client's optimizer of what has joined."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from tessera import _core
from tessera.engine._on_all import on_all
from tessera.errors import ConfigError, UsageError
from tessera.optim._whole import Muon, muon_groups
from tessera.units import ROOT
from tessera.zero._init import early_of
from tessera.zero._owners import Home, set_home

if TYPE_CHECKING:
    from tessera.engine._engine import Engine


def groups_of_frozen(
    model: nn.Module, base: torch.optim.Optimizer | None, given: list[Any] | None, own: bool
) -> dict[int, int]:
    """By id of a frozen parameter, the param group that it joins once it requires gradients: that of the optimizer
    which has it. One that the engine has made (`own`), of `given` (model_parameters), has only what is trained from the
    start: there it is the group that the others beside it in `given` are in, where they are all in one."""
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
    (own,), _ = muon_groups(model.named_parameters(), [{"params": [param]}], {})
    return bool(own["use_muon"] == group["use_muon"])


class EngineJoining:
    """What an Engine does with them."""

    def _add_group(self, group: dict[str, Any]) -> None:
        """optimizer.add_param_group(). With a group that is refused all is as before."""
        engine = cast("Engine", self)
        base = engine._trainable("optimizer.add_param_group").base
        count = len(base.param_groups)
        type(base).add_param_group(base, group)
        try:
            self._follow_params()
        except BaseException as error:
            del base.param_groups[count:]
            if isinstance(error, (ConfigError, UsageError)):
                raise type(error)(f"{error}; the param group was not added{_strangers(engine, group)}") from None
            raise

    def _follow_params(self) -> None:
        """The core is told of what begins to be trained. Local."""
        engine = cast("Engine", self)
        if engine._runner is not None and engine._runner.has_grown():
            _take_groups(engine)
        if engine._frozen:
            _warn_of_thawed(engine)

    def _settle_joined(self) -> None:
        """The optimizer has what the core has let join since the last call."""
        engine = cast("Engine", self)
        numbers = engine.core.take_joined()
        if not numbers or engine._runner is None:
            return
        groups = engine._runner.base.param_groups
        for number in numbers:
            spec = engine.core.param(number)
            listed = groups[spec.group]["params"]
            if not any(param is spec.tensor for param in listed):
                number_of = engine._runner.numbers(engine._index)
                listed.insert(_place([number_of.get(id(p), -1) for p in listed], number), spec.tensor)
            _rename(engine, spec, number)
            engine._runner.joined(number, spec.tensor, spec.group)
        engine._optimized |= frozenset(numbers)

    def _join(self) -> None:
        """Before a save or a load. Collective, over all engines that save together."""
        engine = cast("Engine", self)
        with on_all(engine):
            if engine._runner is not None:
                engine._runner.check_kept()
            self._follow_params()
        with on_all(engine):
            engine.core.join()
            self._settle_joined()


def _place(numbers: list[int], number: int) -> int:
    """Where a group has it that had it from the start."""
    return next((place for place, other in enumerate(numbers) if other > number), len(numbers))


def _rename(engine: Engine, spec: _core.ParamSpec, number: int) -> None:
    group = engine._group_names[spec.group]
    if (spec.name, False) in group:
        group[group.index((spec.name, False))] = (spec.name, True)
        return
    number_of = {other.name: n for n, other in enumerate(engine.core.params())}
    group.insert(_place([number_of[name] for name, _ in group], number), (spec.name, True))


def _take_groups(engine: Engine) -> None:
    runner = engine._runner
    assert runner is not None
    grown = runner.grown()
    groups = {number: runner.options_of(number) for number, _ in grown if number >= len(engine.core.groups())}
    joining = _joining(engine, grown)
    known = [number for number in (engine._index.get(id(param)) for param, _ in joining) if number is not None]
    specs = _specs(engine, [(param, group) for param, group in joining if id(param) not in engine._index])
    engine.core.check_addition(list(groups.values()), specs, known)
    for options in groups.values():
        engine.core.add_group(options)
    for spec in specs:
        engine._index[id(spec.tensor)] = number = engine.core.add_param(spec)
        set_home(spec.tensor, Home(engine.core, number, engine), engine._loans)
    for number, params in grown:
        runner.take_group(number, params)
        engine._group_names += [[] for _ in range(number + 1 - len(engine._group_names))]
    for param, group in joining:
        number = engine._index[id(param)]
        engine.core.set_joins(number, group)
        name = engine.core.param(number).name
        engine._frozen.pop(name, None)
        engine._group_names[group].append((name, False))
    runner.note_params()


def _joining(engine: Engine, grown: list[tuple[int, list[torch.Tensor]]]) -> list[tuple[torch.Tensor, int]]:
    """What has come, with its group."""
    assert engine._runner is not None
    listed = Counter(id(p) for group in engine._runner.base.param_groups for p in group["params"])
    joining = [(param, group) for group, params in grown for param in params]
    for param, group in joining:
        if engine._optimizes(param) or listed[id(param)] > 1:
            name = next((name for name, p in engine.module.named_parameters() if p is param), "a parameter")
            raise UsageError(
                f"[engine] '{name}' was added to param group {group}, and is in another one: change the rates "
                "of that one"
            )
    return joining


def _specs(engine: Engine, joining: list[tuple[torch.Tensor, int]]) -> list[_core.ParamSpec]:
    """Of those that the engine has not seen: of a module that came later, or of none."""
    names = {id(param): name for name, param in engine.module.named_parameters()}
    first = len(engine.core.params())
    return [
        _core.ParamSpec(
            names.get(id(param), f"optimizer.{first + number}"), param, -1, ROOT, *early_of(param), joins=group
        )
        for number, (param, group) in enumerate(joining)
    ]


def _strangers(engine: Engine, group: dict[str, Any]) -> str:
    """What tells parameters that have no name in the model."""
    named = {id(param) for param in engine.module.parameters()}
    others = [tuple(param.shape) for param in group["params"] if id(param) not in named]
    return f"; no module of the model has its parameters of the shapes {others}" if others else ""


def _warn_of_thawed(engine: Engine) -> None:
    thawed = [name for name, param in engine._frozen.items() if param.requires_grad]
    if thawed:
        engine._frozen = {name: param for name, param in engine._frozen.items() if name not in thawed}
        warnings.warn(
            f"[engine] {', '.join(thawed)}: requires gradients now, and is in no param group of the optimizer, which "
            "does not train it; add it: optimizer.add_param_group({'params': [...]})",
            stacklevel=4,
        )
