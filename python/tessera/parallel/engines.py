"""The part of cut models for other packages, beside what users have in tessera.parallel: an engine's model, cut
before its core takes parameters, whole where they leave the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tessera import _core
from tessera.errors import ConfigError
from tessera.parallel import is_model_parallel_parameter
from tessera.parallel._apply import Cutter, Hold, Whole, bind, cuts_of, plan_of
from tessera.parallel._cuts import ParamCut
from tessera.parallel._draws import Draws
from tessera.parallel._hand import bind_hand, has_rules, share
from tessera.parallel._inputs import check_same_inputs, explain_sizes
from tessera.parallel._inside import Watch
from tessera.parallel._modules import Ranks, cut_of
from tessera.parallel._plan import ParallelPlan, make_plan
from tessera.parallel._regions import KEY
from tessera.parallel._rules import facts_of_config

__all__ = ["TensorParallel", "cut_of", "cuts_of", "facts_of_config"]

_Spec = tuple[tuple[int, ...], int, tuple[tuple[int, int], ...]]


class TensorParallel:
    """`cuts`: whether the configuration asks for it; a model that is cut already is taken as it is."""

    def __init__(self, model: nn.Module, config: _core.Config, mesh: _core.Mesh, cuts: bool) -> None:
        self._model = model
        self._mesh = mesh
        self._group = mesh.group(_core.Axis.Tp)
        self._overlap = _core.overlaps_tensor_parallel(config)
        self._ranks: Ranks | None = bind_hand(model, self._group)
        self._by_hand = self._ranks is not None
        self._cuts: dict[int, ParamCut] = {}
        self._checked = False
        self._seen = False  # a forward with gradients
        self._watch: Watch | None = None  # while the first one runs
        self._draws: Draws | None = None  # while a forward in training runs
        self._undo: Callable[[], None] | None = None
        self.plan: ParallelPlan | None = plan_of(model)
        self.warnings: list[str] = []
        self._is_cut = self.plan is not None
        if self._is_cut:
            self._ranks = bind(model, self._group)
        elif cuts and (not self._by_hand or has_rules(config)):
            self.plan = make_plan(model, config, self._group.size)
            self.warnings = [f"[tensor_parallel] {line}" for line in [*self.plan.core.warnings, *self.plan.warnings]]
        if config.tessera.sequence_parallel_norms:
            self._check_regions()

    def _check_regions(self) -> None:
        if self.plan is None:
            self.warnings.append(_core.NO_SEQUENCE_REGIONS)
        elif self._is_cut and self.plan.regions is None and self.plan.size > 1:
            raise ConfigError(
                f"[config] {KEY}: the model was cut without it; cut it (tessera.parallel.shard_model) with the same "
                "configuration"
            )

    @property
    def cuts_params(self) -> bool:
        """Whether ranks of a tensor-parallel group hold slices of some parameters."""
        return (self.plan is not None or self._by_hand) and self._group.size > 1

    @property
    def cuts_sequence(self) -> bool:
        """Whether ranks of a tensor-parallel group hold different values between blocks."""
        return self.plan is not None and self.plan.regions is not None

    def release(self) -> None:
        """Holds no process group any more."""
        self._mesh = _core.Mesh()
        self._group = self._mesh.group(_core.Axis.Tp)

    def cut(self, whole: Whole, hold: Callable[[_core.Mesh], Hold]) -> None:
        """`whole`: makes a partitioned parameter whole; `hold`: what partitions its slices again. Collective."""
        if self.plan is not None and not self._is_cut:
            cutter = Cutter(self._model, self.plan, self._group, whole, hold(self._mesh), self._overlap)
            self._undo = cutter.undo
            cutter.run()
            self._ranks = cutter.ranks
        self._cuts = cuts_of(self._model)

    def settle(self) -> None:
        """The model stays cut from here on."""
        self._undo = None
        if self._by_hand and self._ranks is not None:
            share(self._model, self._ranks)

    def undo(self) -> None:
        """Whole again, where cut() was called and settle() not. Collective."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def spec_of(self, param: torch.Tensor) -> tuple[_core.Axes, _Spec | None]:
        """The fields of a ParamSpec: axes along which the parameter differs, and which slice it is."""
        cut = self._cuts.get(id(param))
        if cut is not None:
            return _core.Axes(_core.Axis.Tp), cut.spec(self._group.rank)
        own = self._group.size > 1 and is_model_parallel_parameter(param)  # cut by the client
        return _core.Axes([_core.Axis.Tp] if own else []), None

    def before_forward(self, args: Any, kwargs: Any, device: torch.device) -> None:
        """Collective: in the first forward, and in those that draw random numbers."""
        if self._ranks is None or self._group.size == 1:
            return
        if not self._checked:
            check_same_inputs(args, kwargs, self._group, device)
            self._checked = True
        if self._model.training:
            self._draws = self._ranks.draws
            self._draws.begin(self._group, device)
        if not self._seen and torch.is_grad_enabled():
            self._watch = Watch(self._model, self._ranks)

    def explained(self, error: BaseException) -> BaseException:
        """An error of a forward: `error`, or one that says which module and rule it comes from."""
        explained = explain_sizes(self._model, error) if self.cuts_params else None
        if explained is not None:
            explained.__cause__ = error
        return explained or error

    def after_forward(self, device: torch.device) -> None:
        """Must be called after a forward that went through. It is collective where before_forward() is."""
        if self._draws is not None:
            self._draws.leave(device)
            self._draws.end(self._group, device)
        if self._watch is not None:
            self._watch.after_forward()
            self._watch, self._seen = None, True

    def end_forward(self, device: torch.device) -> None:
        """Must be called after any forward."""
        draws, self._draws = self._draws, None
        if draws is not None:
            draws.leave(device)
            draws.give_up(device)

    # ---------------------------------------------------------------- state dicts

    def _named(self) -> list[tuple[str, torch.Tensor, ParamCut]]:
        if not self._cuts:
            return []
        named = self._model.named_parameters(remove_duplicate=False)
        return [(name, param, self._cuts[id(param)]) for name, param in named if id(param) in self._cuts]

    def make_whole(self, state: dict[str, Any], prefix: str = "") -> None:
        """Slices of a state dict of the module become the whole parameters, on every rank. Collective."""
        joined: dict[int, torch.Tensor] = {}
        for name, param, cut in self._named():
            if prefix + name not in state:
                continue
            if id(param) not in joined:
                joined[id(param)] = cut.gather(param.detach(), self._group, f"whole value of '{name}'")
            state[prefix + name] = joined[id(param)]

    def slices(self, state: dict[str, Any]) -> dict[str, Any]:
        """Whole parameters of a state dict become this rank's slices."""
        result = dict(state)
        for name, _, cut in self._named():
            value = state.get(name)
            if isinstance(value, torch.Tensor) and tuple(value.shape) == cut.sizes:
                result[name] = cut.take(value, self._group.rank)
        return result
