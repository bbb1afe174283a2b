"""Sequence parallelism under its old names: the exchange of heads and sequence, attention of Transformers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tessera.sequence import TransformersAttention, seq_all_to_all

from deepspeed._mpu import Mpu


class _SeqAllToAll:
    """tessera.sequence.seq_all_to_all, called as an autograd function."""

    @staticmethod
    def apply(
        group: Any, input: torch.Tensor, scatter_idx: int, gather_idx: int, batch_dim_idx: int = 0, *_: Any
    ) -> torch.Tensor:
        return seq_all_to_all(group, input, scatter_idx, gather_idx, batch_dim_idx)


class UlyssesSPAttentionHF(TransformersAttention):
    """tessera.sequence.TransformersAttention, whose groups are an mpu."""

    @classmethod
    @functools.wraps(TransformersAttention.register_with_transformers.__func__)  # type: ignore[attr-defined]
    def register_with_transformers(  # type: ignore[override]
        cls, *args: Any, groups: Any = None, **kwargs: Any
    ) -> Any:
        given = groups.groups if isinstance(groups, Mpu) else groups
        made = super().register_with_transformers(*args, groups=given, **kwargs)
        return None if made is None else Mpu(made)
