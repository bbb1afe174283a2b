"""Activations between blocks that are cut along the sequence (Megatron-LM, arXiv 2205.05198, section 4.2.2).

Note [Sequence regions]
  Before the first block each rank takes its part of the sequence, after the last norm the parts are joined; between
  them norms, dropouts and residuals work on parts. A module with column-parallel layers (attention, MLP) is given the
  whole sequence by a hook, because its code looks at sizes; its layers know that tensor again, so that what they keep
  for the backward is the part (Entrance.open). Its row-parallel layer ends in a reduce-scatter. So the code of the
  model sees whole sequences wherever it computes masks, positions and heads, and parts where a token is by itself.
  Parameters that work on parts get the sum of the ranks' gradients; biases of row layers have the whole one already,
  because their backward gathers. Without gradients a sequence that cannot be cut (a token that is generated) stays
  whole.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import nn

from tessera import _core
from tessera.errors import ConfigError
from tessera.parallel._modules import SEQUENCE_DIM, ModuleCut, Ranks
from tessera.parallel._rules import model_type

KEY = "tessera.sequence_parallel_norms"

# Types of models that are known to treat tokens by themselves between their attentions and MLPs, in Transformers' code.
SERVED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt_neox", "bloom")


@dataclasses.dataclass(frozen=True)
class Regions:
    """Where the sequence is cut. Paths in the model."""

    first: str  # the first block
    last: str  # the norm after the last one
    inner: tuple[str, ...]  # modules of the blocks that need the whole sequence
    norms: tuple[str, ...]  # modules whose parameters work on parts

    def __str__(self) -> str:
        return (
            f"activations from {self.first} to {self.last} are cut along the sequence; whole in {len(self.inner)} "
            f"modules like {self.inner[0]}; gradients of {len(self.norms)} norms are summed"
        )


class _Reason(Exception):
    """Why a model does not take it."""


def find_regions(model: nn.Module, plan: _core.ParallelPlan) -> Regions:
    """ConfigError with the reason for models that do not take it."""
    kind = model_type(model)
    try:
        found = _find(model, plan)
        if kind not in SERVED:
            raise _Reason(f"its code is not known to treat each token by itself there; served are {', '.join(SERVED)}")
    except _Reason as reason:
        raise ConfigError(
            f"[config] {KEY} cuts what lies between attention and MLP, which a model of type '{kind}' does not take: "
            f"{reason}; leave the key out"
        ) from None
    return found


def _find(model: nn.Module, plan: _core.ParallelPlan) -> Regions:
    decisions = [d for d in plan.decisions if d.partition != _core.Partition.Skip and not d.vocabulary]
    listed = _list_of_blocks(model, [d.path for d in decisions])
    blocks = list(model.get_submodule(listed).named_children())
    inner: list[str] = []
    norms: list[str] = []
    for number, block in blocks:
        path = f"{listed}.{number}"
        mine = {d.path: d for d in decisions if d.path.startswith(f"{path}.")}
        _check_block(path, block, mine, inner, norms)
    last = _last_norm(model, listed)
    return Regions(f"{listed}.{blocks[0][0]}", last, tuple(inner), (last, *norms))


def _list_of_blocks(model: nn.Module, cut: list[str]) -> str:
    lists = {path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    around = {min((at for at in lists if path.startswith(f"{at}.")), key=len, default="") for path in cut}
    if len(around) != 1 or "" in around:
        raise _Reason(f"there must be one list of blocks; what is cut lies in {sorted(around) or 'none'}")
    return around.pop()


def _last_norm(model: nn.Module, listed: str) -> str:
    parent, _, name = listed.rpartition(".")
    children = list(model.get_submodule(parent).named_children())
    after = children[[child for child, _ in children].index(name) + 1 :]
    found = [child for child, module in after if is_norm(module)]
    if len(found) != 1:
        raise _Reason(f"one norm must follow the blocks of {listed}, after which parts are joined; found {found}")
    return f"{parent}.{found[0]}" if parent else found[0]


def is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _check_block(path: str, block: nn.Module, mine: dict[str, Any], inner: list[str], norms: list[str]) -> None:
    """Adds the block's modules to the lists."""
    if mine.keys() & {f"{path}.{name}" for name, _ in block.named_children()}:
        raise _Reason(f"layers of {path} are cut in the block itself, where norms work on parts")
    for name, child in block.named_children():
        at = f"{path}.{name}"
        layers = {p: d for p, d in mine.items() if p.startswith(f"{at}.")}
        if layers:
            _check_inner(at, child, layers)
            inner.append(at)
        elif is_norm(child):
            norms.append(at)
        elif any(True for _ in child.parameters()):
            raise _Reason(f"{at}, a {type(child).__name__}, is whole beside the norms of its block")
    if any(True for _ in block.parameters(recurse=False)):
        raise _Reason(f"{path} has parameters of its own")


def _check_inner(path: str, module: nn.Module, layers: dict[str, Any]) -> None:
    """Its direct children begin and end the region; nothing else has weights but norms of heads."""
    for name, child in module.named_modules():
        at = f"{path}.{name}" if name else path
        weights = list(child.parameters(recurse=False))
        decision = layers.get(at)
        if weights and decision is None and not (name and is_norm(child)):
            raise _Reason(f"{at}, a {type(child).__name__}, is whole inside a module that is cut")
        if decision is not None and (name.count(".") or decision.gather_output or decision.param != "weight"):
            raise _Reason(f"{at} is neither a column nor a row layer directly in an attention or MLP")
    rows = [p for p, d in layers.items() if d.partition == _core.Partition.Row]
    if len(rows) != 1 or len(layers) < 2:
        raise _Reason(f"{path} must have column layers and one row layer; {len(layers)} are cut, row layers are {rows}")


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
        fits = x.dim() == 3 and x.size(SEQUENCE_DIM) % ranks.size == 0
        ranks.keeps_whole = not fits and not torch.is_grad_enabled()
        if ranks.keeps_whole:
            return x
        if not fits:
            raise ValueError(
                f"[tensor_parallel] {self._path}: {KEY} cuts activations of [batch, sequence, hidden] along the "
                f"sequence; {tuple(x.shape)} cannot be cut into {ranks.size} equal parts (the tensor-parallel ranks): "
                "pad the sequences, or leave the key out"
            )
        out: torch.Tensor = _core.split_to_ranks(x, ranks.group, SEQUENCE_DIM, label=f"sequence before '{self._path}'")
        if ranks.draws is not None and training:
            ranks.draws.enter(ranks.rank, x.device)
        return out


class EnterRegion:
    """A forward pre-hook of a module with column-parallel layers: the whole sequence."""

    def __init__(self, module: nn.Module, cut: ModuleCut) -> None:
        self._cut = cut  # of one of its column layers
        self._name = _first_argument(module)

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._cut.cuts_sequence:
            return args, kwargs
        region = self._cut.region
        return _replace(self._name, args, kwargs, lambda x: region.entrance.open(x, region))


class JoinSequence:
    """A forward hook of the norm after the blocks: the whole sequence, on every rank."""

    def __init__(self, ranks: Ranks, path: str) -> None:
        self._ranks, self._path = ranks, path

    def __call__(self, _module: nn.Module, _args: Any, out: torch.Tensor) -> torch.Tensor:
        ranks = self._ranks
        if ranks.keeps_whole and not torch.is_grad_enabled():
            return out
        if ranks.draws is not None:
            ranks.draws.leave(out.device)
        whole: torch.Tensor = _core.gather_from_ranks(
            out, ranks.group, SEQUENCE_DIM, label=f"sequence after '{self._path}'"
        )
        return whole
