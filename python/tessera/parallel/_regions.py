"""Activations between blocks that are cut along the sequence: the hooks of Note [Sequence regions] in
tessera/parallel/sequence_regions.h."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from tessera import _core
from tessera.parallel._modules import SEQUENCE_DIM, ModuleCut, Ranks
from tessera.parallel._rules import model_type, text_config

KEY = "tessera.sequence_parallel_norms"
ROUTER_LOSS = "output_router_logits"  # of Transformers: adds a loss of the routers' outputs


def find_regions(model: nn.Module, modules: list[_core.PlanModule], plan: _core.ParallelPlan) -> _core.SequenceRegions:
    """ConfigError with the reason for models that do not take it."""
    loss = bool(getattr(text_config(model), ROUTER_LOSS, False))
    jitter = {path for path, module in model.named_modules() if getattr(module, "jitter_noise", 0.0)}
    return _core.find_sequence_regions(modules, plan.decisions, model_type(model), loss, jitter)


# ---------------------------------------------------------------- hooks


def _first_argument(module: nn.Module) -> str:
    return list(inspect.signature(type(module).forward).parameters)[1]


def _replace(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> Any:
    if name in kwargs:
        return args, {**kwargs, name: change(kwargs[name])}
    return (change(args[0]), *args[1:]), kwargs


class SplitSequence:
    """A forward pre-hook of the first block: this rank's part of what comes in."""

    def __init__(self, module: nn.Module, ranks: Ranks, path: str) -> None:
        self._ranks, self._path = ranks, path
        self._name = _first_argument(module)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _replace(self._name, args, kwargs, lambda x: self._split(x, module.training))

    def _split(self, x: torch.Tensor, training: bool) -> torch.Tensor:
        ranks = self._ranks
        ranks.keeps_whole = _core.stays_whole(x, ranks.size, self._path)
        if ranks.keeps_whole:
            return x
        out: torch.Tensor = _core.split_to_ranks(x, ranks.group, SEQUENCE_DIM, label=f"sequence before '{self._path}'")
        if ranks.draws.on and training:
            ranks.draws.enter(ranks.rank, x.device)
        return out


class EnterRegion:
    """A forward pre-hook of a module with column-parallel layers: the whole sequence."""

    def __init__(self, module: nn.Module, cut: ModuleCut) -> None:
        self._cut = cut  # the cut of one of the module's column layers
        self._name = _first_argument(module)

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._cut.cuts_sequence:
            return args, kwargs
        region = self._cut.region
        return _replace(self._name, args, kwargs, lambda x: region.entrance.open(x, region))


class EnterMixed:
    """A forward pre-hook of a module with layers that are whole: the whole sequence. See Note [Mixed regions]."""

    def __init__(self, module: nn.Module, ranks: Ranks, path: str) -> None:
        self._ranks, self._label = ranks, f"sequence before '{path}'"
        self._name = _first_argument(module)

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._ranks.cut_sequence:
            return args, kwargs
        group = self._ranks.group
        return _replace(
            self._name, args, kwargs, lambda x: _core.gather_for_use(x, group, SEQUENCE_DIM, label=self._label)
        )


class LeaveMixed:
    """A mixed module's forward hook, where no row layer ends it: returns this rank's part of the sum."""

    def __init__(self, ranks: Ranks, path: str) -> None:
        self._ranks, self._label = ranks, f"sequence after '{path}'"

    def __call__(self, _module: nn.Module, _args: Any, out: Any) -> Any:
        if not self._ranks.cut_sequence:
            return out
        if isinstance(out, tuple):  # with the router's logits
            return self._sum(out[0]), *out[1:]
        return self._sum(out)

    def _sum(self, out: torch.Tensor) -> torch.Tensor:
        part: torch.Tensor = _core.scatter_sum(out, self._ranks.group, SEQUENCE_DIM, label=self._label)
        return part


def refuse_router_loss(model: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
    """A forward pre-hook of a model with mixed regions."""
    if kwargs.get(ROUTER_LOSS) or (ROUTER_LOSS not in kwargs and getattr(text_config(model), ROUTER_LOSS, False)):
        raise ValueError(
            f"[tensor_parallel] {ROUTER_LOSS} is not served with {KEY}: the gradient of the router's own loss would be "
            "summed over the tensor-parallel ranks; leave one of them out"
        )


class JoinSequence:
    """A forward hook of the norm after the blocks: the whole sequence, on every rank."""

    def __init__(self, ranks: Ranks, path: str) -> None:
        self._ranks, self._path = ranks, path

    def __call__(self, _module: nn.Module, _args: Any, out: torch.Tensor) -> torch.Tensor:
        ranks = self._ranks
        if ranks.keeps_whole and not torch.is_grad_enabled():
            return out
        if ranks.draws.on:
            ranks.draws.leave(out.device)
        whole: torch.Tensor = _core.gather_from_ranks(
            out, ranks.group, SEQUENCE_DIM, label=f"sequence after '{self._path}'"
        )
        return whole
