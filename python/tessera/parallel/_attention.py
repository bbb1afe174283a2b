"""The parts of an attention module that follow when its projections are cut by heads.

Note [Attention that is cut]
  Between the column-parallel projections and the row-parallel one a rank computes with its heads only. So such a
  module's configuration and what register_class() names have this rank's numbers, tensors with an entry for each head
  are cut, and what the model hands in for all heads (ALiBi) is sliced. The plan knows of attributes with the usual
  names, of norms of single heads and of keys that heads share. A parameter that is none of these is an error: its
  gradient would be wrong in silence.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tessera import _core
from tessera.errors import ConfigError
from tessera.parallel._classes import number_at, rule_of
from tessera.parallel._cuts import ParamCut, Range

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_query_heads", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_multi_query_groups_per_partition")
_WHOLE = (
    "q_a_proj",
    "q_a_layernorm",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
)  # names of low-rank projections, before the cut
_QUERIES = ("q_proj", "q", "query", "q_b_proj", "wq", "q_lin", "to_q")
# scaled_dot_product_attention() on the CPU divides by the number of heads in torch 2.11, not in 2.13.
# Classes of Transformers whose code cannot reshape for no head (Falcon's: of its newer decoder).
_NEEDS_A_HEAD = ("Bloom", "DeepseekV2", "Falcon", "GPT2", "OPT", "T5", "Whisper")
_ATTENDS_WITHOUT_HEADS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
_KEYS = ("k_proj", "k", "key", "wk", "k_lin", "to_k")


@dataclasses.dataclass
class Attention:
    """A module whose direct children are column-parallel by heads. `columns`: those, by their names."""

    path: str
    module: nn.Module
    heads: int  # of the whole model
    mine: list[Range]  # [rank]: its heads
    columns: dict[str, ParamCut]

    def local_heads(self, rank: int) -> int:
        return self.mine[rank][1] - self.mine[rank][0]


@dataclasses.dataclass
class Follow:
    """The parts that follow. Paths are within the module."""

    attributes: list[tuple[nn.Module, str, Any]] = dataclasses.field(default_factory=list)
    embeddings: list[tuple[str, ParamCut]] = dataclasses.field(default_factory=list)  # of each head: by path, its cut
    params: list[tuple[str, ParamCut]] = dataclasses.field(default_factory=list)  # directly of the module
    slices_bias: bool = False  # slices what is handed in for all heads


def heads_of(module: nn.Module) -> int:
    """The number of heads as a module's class or attributes say; 0 for a module without attention."""
    rule = rule_of(type(module))
    if rule is not None and rule.heads is not None:
        return number_at(module, rule.heads)
    config = getattr(module, "config", None)
    for owner, names in ((module, _HEADS), (config, _HEADS[1:4])):
        if owner is config and "ttention" not in type(module).__name__:
            break
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


def key_heads_of(module: nn.Module, heads: int) -> int:
    """Key/value heads, as its class or attributes say, else as many as its key projection has of the size of a query
    head; 0 where that is not known, or heads cannot share them evenly."""
    children, keys, rule = dict(module.named_children()), 0, rule_of(type(module))
    named = rule.key_heads if rule is not None else None
    given = (getattr(module, name, None) for name in (_KV_HEADS if named is None else (named,)))
    known = next((value for value in given if isinstance(value, int) and not isinstance(value, bool)), 0)
    widths = [
        next((getattr(children[name], "out_features", 0) for name in names if name in children), 0)
        for names in (_QUERIES, _KEYS)
    ]
    if known > 0:
        keys = known
    elif all(widths) and widths[0] % heads == 0 and widths[1] * heads % widths[0] == 0:
        keys = widths[1] * heads // widths[0]
    return keys if keys > 0 and heads % keys == 0 else 0


def check_heads(model: nn.Module, decisions: list[_core.Decision]) -> list[str]:
    """ConfigError, before anything is cut, for attention whose ranks would not have whole heads. Warnings of modules
    that look like attention, by the first of each class, and do not say how many heads they have."""
    columns: dict[str, dict[str, ParamCut]] = {}  # by path of the parent
    for decision in decisions:
        if decision.partition != _core.Partition.Column or decision.gather_output or decision.vocabulary:
            continue
        if decision.param != "weight" or isinstance(model.get_submodule(decision.path), nn.Embedding):
            continue
        tails = decision.tail or [0] * len(decision.sizes)  # outputs that all ranks share
        ends = list(itertools.accumulate(size - tail for size, tail in zip(decision.sizes, tails, strict=True)))
        parent, _, name = decision.path.rpartition(".")
        ranges = tuple((mine,) for mine in zip([0, *ends], ends, strict=False))
        columns.setdefault(parent, {})[name] = ParamCut((ends[-1],), 0, ranges)
    unknown: dict[type, str] = {}
    for path, children in columns.items():
        module = model.get_submodule(path)
        if attention_of(path, module, children) is None and _attends(module, children):
            unknown.setdefault(type(module), path)
    return [
        f"{path}: no attribute of {kind.__name__} is known to count its heads: right only where its code takes their "
        f"number from the sizes of its projections, else tessera.parallel.register_class({kind.__name__}, heads=...) "
        "says it"
        for kind, path in unknown.items()
    ]


def _attends(module: nn.Module, columns: dict[str, ParamCut]) -> bool:
    if "ttention" in type(module).__name__:
        return True
    return not columns.keys().isdisjoint(_QUERIES) and not columns.keys().isdisjoint(_KEYS)


def attention_of(path: str, module: nn.Module, columns: dict[str, ParamCut]) -> Attention | None:
    heads = heads_of(module)
    if heads == 0 or not columns:
        return None
    query = next((columns[name] for name in _QUERIES if name in columns), next(iter(columns.values())))
    rows = query.sizes[query.dim]
    mine, at = [], 0
    for rank in range(len(query.ranges)):
        held = query.length(rank) * heads
        if rows % heads or held % rows:
            raise ConfigError(
                f"[tensor_parallel] {path}: {heads} heads in {rows} rows of its projections cannot be cut so that rank "
                f"{rank} has {query.length(rank)} rows; give this module a rule in tensor_parallel.partition_config"
            )
        if held == 0 and not _ATTENDS_WITHOUT_HEADS:
            raise ConfigError(
                f"[tensor_parallel] {path}: rank {rank} of {len(query.ranges)} has none of {heads} heads, and the "
                f"attention of torch {torch.__version__} ends the process where there is no head; use a smaller "
                "autotp_size, or torch 2.13 or newer"
            )
        if held == 0 and _needs_a_head(module):
            raise ConfigError(
                f"[tensor_parallel] {path}: rank {rank} of {len(query.ranges)} has none of {heads} heads, and the code "
                f"of {type(module).__name__} needs one; use a smaller autotp_size"
            )
        mine.append((at, at + held // rows))
        at += held // rows
    return Attention(path, module, heads, mine, columns)


def _needs_a_head(module: nn.Module) -> bool:
    kind = type(module).__name__.removesuffix("Attention")
    return kind in _NEEDS_A_HEAD and (kind != "Falcon" or getattr(module, "new_decoder_architecture", False))


def follow(attention: Attention, rank: int, decided: set[str], explicit: Callable[[str], bool]) -> Follow:
    """`decided`: names of children that the plan takes care of; `explicit`: a rule leaves this parameter whole."""
    result = Follow(_local_numbers(attention, attention.local_heads(rank)))
    module = attention.module
    for name, param in module._parameters.items():
        if param is None or explicit(f"{attention.path}.{name}"):
            continue
        if param.dim() == 0 or param.size(0) != attention.heads:
            raise _unknown(attention, name, param)
        result.params.append((name, ParamCut(tuple(param.shape), 0, tuple((mine,) for mine in attention.mine))))
    for name, child in module.named_children():
        if name in decided or explicit(f"{attention.path}.{name}.weight") or next(child.parameters(), None) is None:
            continue
        if isinstance(child, nn.Embedding) and child.embedding_dim == attention.heads:
            ranges = tuple((mine,) for mine in attention.mine)
            result.embeddings.append((name, ParamCut(tuple(child.weight.shape), 1, ranges)))
        elif name not in _WHOLE:
            raise _unknown(attention, name, next(child.parameters()))
    result.slices_bias = not {"alibi", "position_bias"}.isdisjoint(inspect.signature(type(module).forward).parameters)
    return result


def _unknown(attention: Attention, name: str, param: torch.Tensor) -> ConfigError:
    pattern, sizes = f"{attention.path}.{name}".replace(".", r"\."), "x".join(map(str, param.shape)) or "scalar"
    return ConfigError(
        f"[tensor_parallel] {attention.path}.{name} ({sizes}): the heads around it are cut "
        f"({attention.heads} over {len(attention.mine)} ranks), and it is not known whether it belongs to one head; "
        f"if every head uses all of it, give it a rule for '{pattern}' with partition_type skip and "
        '"grad_allreduce": true in tensor_parallel.partition_config, else the projections around it one with '
        "partition_type skip"
    )


def _local_numbers(attention: Attention, local: int) -> list[tuple[nn.Module, str, Any]]:
    """The values that the configuration and the attributes that the class has registered have on this rank. (Of other
    attributes the plan knows.)"""
    module = attention.module
    config, rule = getattr(module, "config", None), rule_of(type(module))

    def share(value: int) -> int | None:
        return value * local // attention.heads if value * local % attention.heads == 0 else None

    found: list[tuple[nn.Module, str, Any]] = []
    values = {name: getattr(config, name, None) for name in (*_HEADS, *_KV_HEADS)}
    counts = {name: mine for name, v in values.items() if type(v) is int and (mine := share(v)) is not None}
    if counts:
        found.append((module, "config", LocalConfig(config, counts)))
    for name in () if rule is None else rule.counts():
        mine = share(number_at(module, name))
        if mine is not None:
            found.append((module, name, mine))
        elif rule is None or name != rule.key_heads:  # one key serves every head
            raise ConfigError(
                f"[tensor_parallel] {attention.path}.{name} is {getattr(module, name)}, of which {local} of "
                f"{attention.heads} heads have no whole part"
            )
    return found


class LocalConfig:
    """A configuration with this rank's numbers of heads."""

    def __init__(self, whole: Any, local: dict[str, int]) -> None:
        vars(self).update(local, _whole=whole)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_whole":
            raise AttributeError(name)
        return getattr(self._whole, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._whole, name, value)


class SliceBias:
    """A forward pre-hook: of what is handed in for all heads this rank's part."""

    def __init__(self, attention: Attention, rank: int) -> None:
        self._heads = attention.heads
        self._mine = attention.mine[rank]
        self._names = list(inspect.signature(type(attention.module).forward).parameters)[1:]

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(self._names, args, strict=False))
        for name in ("alibi", "position_bias", "attention_mask"):
            value = kwargs.get(name, given.get(name))
            if not isinstance(value, torch.Tensor) or (name == "attention_mask" and not self._by_heads(value)):
                continue
            kwargs = {**kwargs, name: self._slice(value)}
            if name in given:
                at = self._names.index(name)
                args = (*args[:at], kwargs.pop(name), *args[at + 1 :])
        return args, kwargs

    def _by_heads(self, mask: torch.Tensor) -> bool:
        """A mask that a bias was added to, [batch, heads, x, y]."""
        return mask.dim() == 4 and mask.size(1) == self._heads > 1

    def _slice(self, bias: torch.Tensor) -> torch.Tensor:
        """[..., heads, x, y], or [batch * heads, x, y]; what has other sizes is this rank's already."""
        begin, end = self._mine
        if bias.dim() < 3 or bias.size(-3) % self._heads:
            return bias
        parts = bias.unflatten(-3, (-1, self._heads)).narrow(-3, begin, end - begin)
        return parts.flatten(-4, -3)
