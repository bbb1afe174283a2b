"""Names of DeepSpeed's that tessera.sequence took before, in their shapes, until 0.3.0: see tessera/_former.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tessera import _core
from tessera.errors import ConfigError
from tessera.sequence._attention import SequenceAttention, to_heads, to_sequence
from tessera.sequence._tiled import tiled, tiled_loss, tiled_mlp

Function = Callable[..., torch.Tensor]


class DistributedAttention(SequenceAttention):
    def __init__(
        self,
        local_attention: Function,
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        parts: int = 1,
    ) -> None:
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise ConfigError(
                f"[DistributedAttention] heads are dim 2, the sequence 0 or 1: {scatter_idx}, {gather_idx}"
            )
        super().__init__(local_attention, sequence_process_group, parts=parts)

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
        _core.check_sequence_dim(1 - batch_dim_idx, "DistributedAttention")
        self.sequence_dim = 1 - batch_dim_idx
        return super().forward(query, key, value, *args, rotary=rotary_pos_emb, **kwargs)


def seq_all_to_all(
    group: Any,
    input: torch.Tensor,
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int = 0,
    heads: int | None = None,
) -> torch.Tensor:
    if (scatter_idx == 2) == (gather_idx == 2):
        raise ConfigError(f"[seq_all_to_all] one of {scatter_idx} and {gather_idx} must be 2, the heads")
    if scatter_idx == 2:
        return to_heads(input, group, sequence_dim=1 - batch_dim_idx)
    return to_sequence(input, group, sequence_dim=1 - batch_dim_idx, heads=heads)


def sequence_tiled_compute(
    fn: Function,
    seqlen: int,
    shards: int,
    kwargs_to_shard: dict[str, Any],
    kwargs_to_pass: dict[str, Any],
    grad_requiring_tensor_key: str | None = None,
    compute_params: Any = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    how = {"tiles": shards, "join_dim": output_unshard_dimension, "reduction": output_reduction}
    return tiled(fn, kwargs_to_shard, kwargs_to_pass, **how)  # type: ignore[arg-type]


class SequenceTiledCompute:
    @staticmethod
    def apply(
        fn: Function, seqlen: int, shards: int, keys_to_shard: list[str], keys_to_pass: list[str], *more: Any
    ) -> torch.Tensor:
        """`more`: the last four of sequence_tiled_compute(), then the values of keys_to_shard and keys_to_pass."""
        values = dict(zip([*keys_to_shard, *keys_to_pass], more[4:], strict=True))
        cut, whole = ({name: values[name] for name in names} for names in (keys_to_shard, keys_to_pass))
        return sequence_tiled_compute(fn, seqlen, shards, cut, whole, *more[:4])


class TiledMLP:
    @staticmethod
    def apply(fn: Function, self: Any, x: torch.Tensor, shards: int, compute_params: Any = None) -> torch.Tensor:
        return tiled_mlp(functools.partial(fn, self), x, shards)


class TiledFusedLogitsLoss:
    @staticmethod
    def apply(
        fn: Function,
        self: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Any = None,
        output_reduction: str = "mean",
    ) -> torch.Tensor:
        return tiled_loss(functools.partial(fn, self), x, y, mask, tiles=shards, reduction=output_reduction)
