"""deepspeed.sequence.layer: the exchange of heads and sequence under its old name."""

from __future__ import annotations

from typing import Any

import torch
from tessera.sequence import seq_all_to_all


class _SeqAllToAll:
    """tessera.sequence.seq_all_to_all, called as an autograd function."""

    @staticmethod
    def apply(
        group: Any, input: torch.Tensor, scatter_idx: int, gather_idx: int, batch_dim_idx: int = 0, *_: Any
    ) -> torch.Tensor:
        return seq_all_to_all(group, input, scatter_idx, gather_idx, batch_dim_idx)
