"""Watches what the first forward with gradients shows of a model that is cut.

Note [Whole parameters in regions]
  A whole parameter between a column-parallel layer and the next row-parallel one (a learned activation, a norm of one
  head, a gain) works on this rank's slice only: its gradient is a term of a sum over the ranks. One before or after is
  not, and names do not tell them apart. The autograd graph does: what is reached from the input of a row layer without
  going through a column layer is in the region. So each row layer looks there once, in its first forward with gradients
  (a replay counts), and gradients of what it finds are summed from that backward on. What cannot be right is an error:
  a weight that is cut and used without its module, and activations that come in beside the column layers.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn

from tessera.errors import ConfigError, UsageError
from tessera.parallel._apply import is_summed, plan_of, sum_gradient
from tessera.parallel._modules import BORDER, ModuleCut, Ranks, cut_of

# Nodes of the graph, by the ends of their names: a region begins here; these are behind an earlier region.
_BEGIN = ("ColumnFunction>", "MoveFunction>")
_BEHIND = ("RowFunction>", "EmbeddingFunction>")
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
            raise UsageError(_used_alone(cut))

    # ---------------------------------------------------------------- the graph

    @functools.cached_property
    def _layers(self) -> dict[int, ModuleCut]:
        """The cuts of layers, by id of their parameters."""
        return {id(p): c for m, c in self._cuts() if c.kind in _LAYERS for p in m.parameters(recurse=False)}

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        return {id(param): name for name, param in self._model.named_parameters()}

    def _look(self, cut: ModuleCut, x: torch.Tensor) -> None:
        found, behind = _reached(x)
        for param in found:
            if (layer := self._layers.get(id(param))) is not None:
                raise UsageError(_used_alone(layer))
        names, block = self._names if found else {}, _block_of(self._model, cut.path)
        outside = [p for p in found if not names.get(id(p), "").startswith(block)]
        if behind or any(not is_summed(p) and not getattr(p, "tensor_model_parallel", False) for p in outside):
            known = [names[id(p)] for p in found if id(p) in names]
            raise ConfigError(_beside(cut, known))
        for param in found:
            if not getattr(param, "tensor_model_parallel", False):
                sum_gradient(param, names[id(param)], self._ranks)


def _reached(x: torch.Tensor) -> tuple[list[torch.Tensor], bool]:
    """Leaves of the region that ends with `x`; whether anything in it comes from an earlier region."""
    leaves: list[torch.Tensor] = []
    seen: set[Any] = set()
    nodes: list[Any] = [x.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name.endswith("::AccumulateGrad"):
            leaves.append(node.variable)
        elif name.endswith(_BEHIND):
            return leaves, True
        elif not name.endswith(_BEGIN) and BORDER not in node.metadata:
            nodes += [following for following, _ in node.next_functions]
    return leaves, False


def _block_of(model: nn.Module, path: str) -> str:
    """The element of the outermost list of modules around a layer, or else its parent: "layers.0."."""
    parts = path.split(".")
    for end in range(1, len(parts) - 1):
        if isinstance(model.get_submodule(".".join(parts[:end])), nn.ModuleList):
            return ".".join(parts[: end + 1]) + "."
    return "".join(f"{part}." for part in parts[:-1])


def _used_alone(cut: ModuleCut) -> str:
    return (
        f"[tensor_parallel] {cut.path}: its weight is used without a call of the module, so what it computes of a "
        "slice is not put together over the ranks; call the module, or give it a rule with partition_type skip in "
        "tensor_parallel.partition_config"
    )


def _beside(cut: ModuleCut, names: list[str]) -> str:
    through = f" (through {', '.join(names[:3])})" if names else ""
    return (
        f"[tensor_parallel] {cut.path}: what comes into this row layer depends on activations that every rank has "
        f"whole beside those of column layers{through}, and their gradient would be a part of the true one; give the "
        "layers around it rules with partition_type skip in tensor_parallel.partition_config, or, where it is a "
        'parameter that only cut layers use, give that one partition_type skip and "grad_allreduce": true'
    )
