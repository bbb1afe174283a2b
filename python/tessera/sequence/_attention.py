"""Attention over a sequence that ranks share (Ulysses, arXiv 2309.14509): outside a rank has a part of the
sequence and all heads, inside all of the sequence and a part of the heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tessera import _core
from tessera._mesh import OneGroup, core_group
from tessera.errors import ConfigError

_HEADS = 2  # dim of [sequence, batch, heads, head_dim] and of [batch, sequence, heads, head_dim]


Rotary = tuple[torch.Tensor, torch.Tensor]


def check_parts(parts: object, label: str) -> None:
    if not isinstance(parts, int) or isinstance(parts, bool):
        raise ConfigError(f"[{label}] parts is a {type(parts).__name__}, not an integer")
    _core.check_parts(parts, label)


def check_sequence_dim(sequence_dim: Any, label: str) -> int:
    if sequence_dim not in (0, 1) or isinstance(sequence_dim, bool):
        raise ConfigError(f"[{label}] sequence_dim must be 0 or 1, got {sequence_dim!r}")
    return sequence_dim


def to_heads(x: torch.Tensor, group: OneGroup, *, sequence_dim: int = 1) -> torch.Tensor:
    """Turns this rank's part of the sequence with all heads into the whole sequence with this rank's heads. `x`:
    [batch, sequence, heads, ...], or [sequence, batch, heads, ...] with sequence_dim 0. Heads need not divide: rank r
    has the r-th of nearly equal parts, the larger ones first. `group`: a torch ProcessGroup or a group of tessera.
    Collective, in the backward too."""
    ranks = core_group(group)
    check_sequence_dim(sequence_dim, "to_heads")
    if ranks.size == 1:
        return x
    sizes = _core.part_sizes(x.size(_HEADS), ranks.size)
    if sizes[-1] == 0:
        raise ConfigError(
            f"[to_heads] {x.size(_HEADS)} heads cannot be dealt out to {ranks.size} sequence-parallel ranks: each "
            "needs one at least"
        )
    return _core.exchange([x], ranks, _HEADS, sequence_dim, [sizes], [], "to_heads")[0]


def to_sequence(x: torch.Tensor, group: OneGroup, *, sequence_dim: int = 1, heads: int | None = None) -> torch.Tensor:
    """Turns what to_heads() gave back. `heads`: how many there are in all; if not given, the ranks ask each other.
    Collective, in the backward too."""
    ranks = core_group(group)
    check_sequence_dim(sequence_dim, "to_sequence")
    if ranks.size == 1:
        return x
    if x.size(sequence_dim) % ranks.size:
        raise ConfigError(
            f"[to_sequence] a sequence of {x.size(sequence_dim)} tokens is not divisible by the {ranks.size} ranks of "
            "sequence_parallel_size"
        )
    if heads is None:
        mine = torch.tensor([x.size(_HEADS)], device=x.device)
        sizes = [int(size) for size in _core.gather_from_ranks(mine, ranks, 0, [], "to_sequence").tolist()]
    else:
        sizes = _core.part_sizes(heads, ranks.size)
    return _core.exchange([x], ranks, sequence_dim, _HEADS, [[]], sizes, "to_sequence")[0]


class SequenceAttention(nn.Module):
    """Any attention over the sequence of all ranks of `group` (a torch ProcessGroup or a group of tessera).

    local_attention(query, key, value, *args, **kwargs) gets the whole sequence and this rank's heads, in the layout of
    the inputs, and returns as many heads, [..., heads, head_dim] or [..., heads * head_dim].

    parts: local attentions and exchanges by which the heads go (fewer where a rank has fewer key/value heads, one where
    the ranks have unequally many): while a part's attention runs, the others' exchanges are on their way, in the
    backward too. Bytes are the same. For a local_attention that treats heads alike: it does not know which part it has.
    """

    def __init__(
        self, local_attention: Callable[..., torch.Tensor], group: OneGroup, *, sequence_dim: int = 1, parts: int = 1
    ) -> None:
        super().__init__()
        check_parts(parts, "SequenceAttention")
        self.sequence_dim = check_sequence_dim(sequence_dim, "SequenceAttention")
        self.local_attn = local_attention
        self.parts = parts
        self.group = core_group(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceAttention:
        """Copies a local attention that is a module, and keeps the same ranks."""
        import copy

        copied = type(self)(copy.deepcopy(self.local_attn, memo), self.group, parts=self.parts)
        copied.sequence_dim = self.sequence_dim
        return copied

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        rotary: Rotary | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[batch, sequence / ranks, heads, head_dim] with sequence_dim 1, [sequence / ranks, batch, heads, head_dim]
        with 0. Key and value may have fewer heads. rotary: (cosines, sines) [sequence, batch or 1, 1, width] of the
        whole sequence, applied to query and key inside. Collective."""
        sequence = self.sequence_dim
        for name, t in (("query", query), ("key", key), ("value", value)):
            if t.dim() != 4 or t.size(sequence) != query.size(sequence):
                raise ConfigError(
                    f"[SequenceAttention] {name} has the sizes {list(t.shape)}, query {list(query.shape)}: all must be "
                    f"4-D with the sequence in dim {sequence}"
                )
        if self.group.size == 1:
            query, key = self._rotated(query, key, rotary, sequence)
            return self.local_attn(query, key, value, *args, **kwargs)
        _core.deal_heads(query.size(_HEADS), key.size(_HEADS), self.group.size, "SequenceAttention")
        parts = _core.HeadParts(query, key, value, _core.SequenceCut(self.group, sequence, parts=self.parts))
        flat = False
        for part in range(len(parts)):
            query, key, value, heads = parts.take(part)
            query, key = self._rotated(query, key, rotary, sequence)
            context = self.local_attn(query, key, value, *args, **kwargs)
            flat = context.dim() == 3
            parts.give(part, context.unflatten(_HEADS, (heads.queries[self.group.rank], -1)) if flat else context)
        return parts.join().flatten(_HEADS) if flat else parts.join()

    def _rotated(
        self, query: torch.Tensor, key: torch.Tensor, rotary: Rotary | None, sequence: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if rotary is None:
            return query, key
        cos, sin = (t if sequence == 0 else t.transpose(0, 1) for t in rotary)
        return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    width = cos.size(-1)
    turned, kept = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned, kept], -1)
