"""Watches what the first forward with gradients shows of a model that is cut: Note [Whole parameters in regions] in
tessera/parallel/inside.h, which finds them."""

from __future__ import annotations

import functools
import sys

import torch
from torch import nn

from tessera import _core
from tessera.parallel._apply import is_summed, plan_of, sum_gradient
from tessera.parallel._modules import ModuleCut, Ranks, cut_of

_LAYERS = ("column", "row")
_WATCHED = (*_LAYERS, "embedding", "vocabulary")


class Watch:
    """A watch over one model's modules, for one engine. It hangs in each module until there is nothing more to see."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks
        self._ran: set[int] = set()  # ids of ModuleCuts
        plan = plan_of(model)
        mixed = plan.regions.mixed if plan is not None and plan.regions is not None else ()
        self._mixed = tuple(f"{path}." for path in mixed)  # terms of sums throughout, and summed already
        if "torch._dynamo" in sys.modules:  # where anything may be compiled
            vars(self)["ran"] = torch.compiler.disable(self.ran)
        for _, cut in self._cuts():
            cut.watch = self

    def _cuts(self) -> list[tuple[nn.Module, ModuleCut]]:
        found = [(module, cut) for module in self._model.modules() if (cut := cut_of(module)) is not None]
        return [(module, cut) for module, cut in found if cut.kind in _WATCHED]

    def ran(self, cut: ModuleCut, x: torch.Tensor | None = None) -> None:
        """The module's forward runs; `x`: this rank's slice that comes into a row layer."""
        self._ran.add(id(cut))
        if x is not None and not cut.path.startswith(self._mixed):
            if not (torch.is_grad_enabled() and x.requires_grad):
                return  # a replay will look, or a later forward
            self._look(cut, x)
        cut.watch = None

    def after_forward(self) -> None:
        """Called after the first forward: weights whose modules did not run must not get gradients before they do."""
        cuts = self._cuts()
        used = {id(p) for module, cut in cuts if id(cut) in self._ran for p in module.parameters(recurse=False)}
        for module, cut in cuts:
            weight = module._parameters.get("weight")
            if weight is not None and weight.requires_grad and id(weight) not in used:
                weight.register_hook(functools.partial(self._check, cut))

    def _check(self, cut: ModuleCut, _gradient: torch.Tensor) -> None:
        if id(cut) not in self._ran:
            _core.refuse_weight_alone(cut.path)

    def _look(self, cut: ModuleCut, x: torch.Tensor) -> None:
        layers = {id(p): c.path for m, c in self._cuts() if c.kind in _LAYERS for p in m.parameters(recurse=False)}
        lists = [path for path, module in self._model.named_modules() if isinstance(module, nn.ModuleList)]
        named = list(self._model.named_parameters())
        params = []
        for name, param in named:
            settled = is_summed(param) or getattr(param, "tensor_model_parallel", False)
            params.append(_core.RegionParam(name, param, settled, layers.get(id(param), "")))
        for i in _core.whole_inside(cut.path, x, params, lists):
            sum_gradient(named[i][1], named[i][0], self._ranks)
