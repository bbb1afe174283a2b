"""Attention over a sequence that ranks share (Ulysses, arXiv 2309.14509): outside of it a rank has a part of the
sequence and all heads, inside all of the sequence and a part of the heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tessera import _core
from tessera._mesh import core_group
from tessera.errors import ConfigError

_HEADS = 2  # dim of [sequence, batch, heads, head_dim] and of [batch, sequence, heads, head_dim]


def check_parts(parts: Any, label: str) -> None:
    if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1:
        raise ConfigError(f"[{label}] parts must be an integer of 1 or more, got {parts!r}")


def seq_all_to_all(
    group: Any,
    input: torch.Tensor,
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int = 0,
    heads: int | None = None,
) -> torch.Tensor:
    """One tensor [batch, sequence, heads, ...] (batch_dim_idx 0) or [sequence, batch, heads, ...] (1), cut along
    scatter_idx into the ranks' parts and joined along gather_idx. Dim 2 is the heads, 0 or 1 stand for the sequence,
    whichever is not the batch. Calling it again with the two changed gives the input back. Heads need not divide: rank
    r has the r-th of nearly equal parts, the larger ones first. `heads`: on the way back how many there are in all; if
    not given, the ranks ask each other. Collective, in the backward too.
    """
    ranks = core_group(group)
    if ranks.size == 1:
        return input
    sequence = _sequence_dim(batch_dim_idx)
    if {scatter_idx == _HEADS, gather_idx == _HEADS} != {True, False}:
        raise ConfigError(
            f"[seq_all_to_all] one of scatter_idx {scatter_idx} and gather_idx {gather_idx} must be {_HEADS}, the heads"
        )
    if scatter_idx == _HEADS:
        sizes = _core.part_sizes(input.size(_HEADS), ranks.size)
        if sizes[-1] == 0:
            raise ConfigError(
                f"[seq_all_to_all] {input.size(_HEADS)} heads cannot be dealt out to {ranks.size} sequence-parallel "
                "ranks: each "
                "needs one at least"
            )
        return _core.exchange([input], ranks, _HEADS, sequence, [sizes], [], "seq_all_to_all")[0]
    _check_length(input.size(sequence), ranks.size, "seq_all_to_all")
    if heads is None:
        mine = torch.tensor([input.size(_HEADS)], device=input.device)
        sizes = [int(size) for size in _core.gather_from_ranks(mine, ranks, 0, [], "seq_all_to_all").tolist()]
    else:
        sizes = _core.part_sizes(heads, ranks.size)
    return _core.exchange([input], ranks, sequence, _HEADS, [[]], sizes, "seq_all_to_all")[0]


class DistributedAttention(nn.Module):
    """Any attention over the sequence of all ranks of `sequence_process_group` (a torch ProcessGroup or a group of
    tessera).

    local_attention(query, key, value, *args, **kwargs) gets the whole sequence and this rank's heads, in the layout of
    the inputs, and returns as many heads, [..., heads, head_dim] or [..., heads * head_dim].

    scatter_idx and gather_idx are the heads' and the sequence's dim; which of dims 0 and 1 is the sequence says
    batch_dim_idx of the call. sp_stream is accepted and not used: the exchange orders itself with the tensors' stream.

    parts: local attentions and exchanges by which the heads go (fewer where a rank has fewer key/value heads, one where
    the ranks have unequally many): while a part's attention runs, the others' exchanges are on their way, in the
    backward too. Bytes are the same. For a local_attention that treats heads alike: it does not know which it has.
    """

    def __init__(
        self,
        local_attention: Callable[..., torch.Tensor],
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        parts: int = 1,
    ) -> None:
        super().__init__()
        if scatter_idx != _HEADS or gather_idx not in (0, 1):
            raise ConfigError(
                f"[DistributedAttention] scatter_idx must be {_HEADS} (heads) and gather_idx 0 or 1 (sequence), got "
                f"{scatter_idx} and {gather_idx}"
            )
        check_parts(parts, "DistributedAttention")
        self.local_attn = local_attention
        self.parts = parts
        self.group = core_group(sequence_process_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedAttention:
        """With a copy of a local attention that is a module, and the same ranks."""
        import copy

        return DistributedAttention(copy.deepcopy(self.local_attn, memo), self.group, parts=self.parts)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int = 0,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[batch, sequence / ranks, heads, head_dim] with batch_dim_idx 0, [sequence / ranks, batch, heads, head_dim]
        with 1. Key and value may have fewer heads. rotary_pos_emb: (cosines, sines) [sequence, batch or 1, 1, width] of
        the whole sequence, applied to query and key inside."""
        sequence = _sequence_dim(batch_dim_idx)
        for name, t in (("query", query), ("key", key), ("value", value)):
            if t.dim() != 4 or t.size(sequence) != query.size(sequence):
                raise ConfigError(
                    f"[DistributedAttention] {name} has the sizes {list(t.shape)}, query {list(query.shape)}: all must "
                    "be 4-D with "
                    f"the sequence in dim {sequence}"
                )
        if self.group.size == 1:
            query, key = self._rotated(query, key, rotary_pos_emb, sequence)
            return self.local_attn(query, key, value, *args, **kwargs)
        _core.deal_heads(query.size(_HEADS), key.size(_HEADS), self.group.size, "DistributedAttention")
        parts = _core.HeadParts(query, key, value, _core.SequenceCut(self.group, sequence, parts=self.parts))
        flat = False
        for part in range(len(parts)):
            query, key, value, heads = parts.take(part)
            query, key = self._rotated(query, key, rotary_pos_emb, sequence)
            context = self.local_attn(query, key, value, *args, **kwargs)
            flat = context.dim() == 3
            parts.give(part, context.unflatten(_HEADS, (heads.queries[self.group.rank], -1)) if flat else context)
        return parts.join().flatten(_HEADS) if flat else parts.join()

    def _rotated(
        self, query: torch.Tensor, key: torch.Tensor, rotary: Any, sequence: int
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


def _sequence_dim(batch_dim_idx: int) -> int:
    if batch_dim_idx not in (0, 1) or isinstance(batch_dim_idx, bool):
        raise ConfigError(f"[DistributedAttention] batch_dim_idx must be 0 or 1, got {batch_dim_idx!r}")
    return 1 - batch_dim_idx


def _check_length(length: int, ranks: int, label: str) -> None:
    if length % ranks:
        raise ConfigError(
            f"[{label}] a sequence of {length} tokens is not divisible by the {ranks} ranks of sequence_parallel_size"
        )
