"""Long sequences: ranks that share one (Ulysses), and layers that run over it a tile at a time. See
docs/sequence_parallel.md."""

from __future__ import annotations

from tessera._former import former_names
from tessera.sequence import _former
from tessera.sequence._attention import SequenceAttention, to_heads, to_sequence
from tessera.sequence._groups import SequenceParallelGroups, make_groups
from tessera.sequence._huggingface import TransformersAttention
from tessera.sequence._loader import SequenceLoader
from tessera.sequence._loss import mean_over_sequence, sequence_cross_entropy
from tessera.sequence._tiled import tiled, tiled_loss, tiled_mlp

__all__ = [
    "SequenceAttention",
    "SequenceLoader",
    "SequenceParallelGroups",
    "TransformersAttention",
    "make_groups",
    "mean_over_sequence",
    "sequence_cross_entropy",
    "tiled",
    "tiled_loss",
    "tiled_mlp",
    "to_heads",
    "to_sequence",
]

__getattr__ = former_names(
    __name__,
    {
        "DistributedAttention": "SequenceAttention",
        "SequenceTiledCompute": "tiled",
        "TiledFusedLogitsLoss": "tiled_loss",
        "TiledMLP": "tiled_mlp",
        "initialize_sequence_parallel": "make_groups",
        "seq_all_to_all": "to_heads and to_sequence",
        "sequence_tiled_compute": "tiled",
        "vocab_sequence_parallel_cross_entropy": "sequence_cross_entropy",
    },
    globals(),
    vars(_former),
)
