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

Note [Mixed regions]
  Experts with their router, and attention with low-rank projections, have layers that are whole beside those that are
  cut. Such a module is given the whole sequence as well, and nothing inside of it talks: what its layers compute are
  terms of sums over the ranks, because all that follows up to the sum is linear in them. The sum is the reduce-scatter
  where the module ends: of its row-parallel layer, or of what comes out. Gradients inside are terms of sums, too: of
  what comes in, that is the reduce-scatter of its gather; of layers that are whole it is that of their parameters.
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
from tessera.parallel._rules import model_type, text_config

KEY = "tessera.sequence_parallel_norms"
ROUTER_LOSS = "output_router_logits"  # of Transformers: adds a loss of the routers' outputs

# Types of models that are known to treat tokens by themselves between their attentions and MLPs, in Transformers' code.
MIXED = ("mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3")  # with experts or low-rank projections
SERVED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt_neox", "bloom", *MIXED)


@dataclasses.dataclass(frozen=True)
class SequenceRegions:
    """The places where the sequence is cut. Paths in the model."""

    first: str  # the first block
    last: str  # the norm after the last one
    inner: tuple[str, ...]  # modules of the blocks that need the whole sequence
    norms: tuple[str, ...]  # modules whose parameters work on parts
    mixed: tuple[str, ...] = ()  # modules of the blocks that enter a region themselves: Note [Mixed regions]
    sums: tuple[str, ...] = ()  # those of them that leave it themselves; the others end in a row layer
    whole: tuple[str, ...] = ()  # in them: modules whose parameters are whole

    @property
    def summed(self) -> tuple[str, ...]:
        """Modules whose parameters' gradients are summed over the ranks."""
        return self.norms + self.whole

    def __str__(self) -> str:
        return (
            f"activations from {self.first} to {self.last} are cut along the sequence; whole in "
            f"{len(self.inner + self.mixed)} modules like {(self.inner + self.mixed)[0]}; gradients of "
            f"{len(self.norms)} norms{f' and {len(self.whole)} layers' if self.whole else ''} are summed"
        )


class _Reason(Exception):
    """Why a model does not take it."""


def find_regions(model: nn.Module, plan: _core.ParallelPlan) -> SequenceRegions:
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


def _find(model: nn.Module, plan: _core.ParallelPlan) -> SequenceRegions:
    decisions = [d for d in plan.decisions if d.partition != _core.Partition.Skip and not d.vocabulary]
    listed = _list_of_blocks(model, [d.path for d in decisions])
    blocks = list(model.get_submodule(listed).named_children())
    found = _Found(model_type(model) in MIXED)
    for number, block in blocks:
        path = f"{listed}.{number}"
        mine = {d.path: d for d in decisions if d.path.startswith(f"{path}.")}
        _check_block(path, block, mine, found)
    if found.sums and getattr(text_config(model), ROUTER_LOSS, False):
        raise _Reason(f"its configuration has {ROUTER_LOSS}, and the gradient of the router's own loss would be summed")
    last = _last_norm(model, listed)
    return SequenceRegions(
        f"{listed}.{blocks[0][0]}",
        last,
        tuple(found.inner),
        (last, *found.norms),
        tuple(found.mixed),
        tuple(found.sums),
        tuple(found.whole),
    )


@dataclasses.dataclass
class _Found:
    """Fields of SequenceRegions in the making."""

    takes_mixed: bool
    inner: list[str] = dataclasses.field(default_factory=list)
    norms: list[str] = dataclasses.field(default_factory=list)
    mixed: list[str] = dataclasses.field(default_factory=list)
    sums: list[str] = dataclasses.field(default_factory=list)
    whole: list[str] = dataclasses.field(default_factory=list)


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


def _check_block(path: str, block: nn.Module, mine: dict[str, Any], found: _Found) -> None:
    """Adds the block's modules to what is found."""
    if mine.keys() & {f"{path}.{name}" for name, _ in block.named_children()}:
        raise _Reason(f"layers of {path} are cut in the block itself, where norms work on parts")
    for name, child in block.named_children():
        at = f"{path}.{name}"
        layers = {p: d for p, d in mine.items() if p.startswith(f"{at}.")}
        if layers:
            if found.takes_mixed and _is_mixed(at, child, layers):
                _check_mixed(at, child, layers, found)
            else:
                _check_inner(at, child, layers)
                found.inner.append(at)
        elif is_norm(child):
            found.norms.append(at)
        elif any(True for _ in child.parameters()):
            raise _Reason(
                f"{at}, a {type(child).__name__}, is whole beside the norms of its block "
                "(tensor_parallel.preset_model or partition_config may cut it)"
            )
    if any(True for _ in block.parameters(recurse=False)):
        raise _Reason(f"{path} has parameters of its own")


def _check_inner(path: str, module: nn.Module, layers: dict[str, Any]) -> None:
    """Refuses a module whose direct children do not begin and end the region, or with other weights than norms of
    heads."""
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


def _is_mixed(path: str, module: nn.Module, layers: dict[str, Any]) -> bool:
    """Whether a module has layers that are whole, or layers further down than its children."""
    for name, child in module.named_modules():
        if any(True for _ in child.parameters(recurse=False)):
            whole = (f"{path}.{name}" if name else path) not in layers and not is_norm(child)
            if whole or "." in name:
                return True
    return False


def _check_mixed(path: str, module: nn.Module, layers: dict[str, Any], found: _Found) -> None:
    rows = [at for at, d in layers.items() if d.partition == _core.Partition.Row]
    ends = len(rows) == 1 and "." not in rows[0].removeprefix(f"{path}.") and layers[rows[0]].param == "weight"
    if not rows:
        raise _Reason(f"{path} has no row layer")
    if getattr(module, "jitter_noise", 0.0):
        raise _Reason(f"{path} has jitter_noise, which ranks would draw each for themselves")
    for name, child in module.named_modules():
        at = f"{path}.{name}" if name else path
        if at in rows and not ends and child._parameters.get("bias") is not None:
            raise _Reason(f"{at} has a bias, which the sum over the ranks would count several times")
        if at not in layers and any(True for _ in child.parameters(recurse=False)):
            found.whole.append(at)
    found.mixed.append(path)
    if not ends:
        found.sums.append(path)


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
