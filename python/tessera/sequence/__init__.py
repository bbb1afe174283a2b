"""Long sequences: ranks that share one (Ulysses), and layers that run over it a tile at a time. See
docs/sequence_parallel.md."""

from __future__ import annotations

from tessera.sequence._attention import DistributedAttention, seq_all_to_all
from tessera.sequence._groups import SequenceParallelGroups, initialize_sequence_parallel
from tessera.sequence._huggingface import TransformersAttention
from tessera.sequence._loader import SequenceLoader
from tessera.sequence._loss import mean_over_sequence, vocab_sequence_parallel_cross_entropy
from tessera.sequence._tiled import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)

__all__ = [
    "DistributedAttention",
    "SequenceLoader",
    "SequenceParallelGroups",
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "TransformersAttention",
    "initialize_sequence_parallel",
    "mean_over_sequence",
    "seq_all_to_all",
    "sequence_tiled_compute",
    "vocab_sequence_parallel_cross_entropy",
]
