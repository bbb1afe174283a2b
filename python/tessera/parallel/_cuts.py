"""Which slice of a whole parameter each rank of a tensor-parallel group holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from tessera import _core

Range = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ParamCut:
    sizes: tuple[int, ...]  # of the whole
    dim: int  # along which it is cut
    ranges: tuple[tuple[Range, ...], ...]  # [rank]: of that dim, joined in this order

    def length(self, rank: int) -> int:
        return sum(end - begin for begin, end in self.ranges[rank])

    def shape(self, rank: int) -> tuple[int, ...]:
        return (*self.sizes[: self.dim], self.length(rank), *self.sizes[self.dim + 1 :])

    def take(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """The slice of `rank`, contiguous, in memory of its own."""
        parts = [whole.narrow(self.dim, begin, end - begin) for begin, end in self.ranges[rank]]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].contiguous().clone()

    def join(self, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole of all ranks' slices."""
        whole = slices[0].new_empty(self.sizes)
        for ranges, piece in zip(self.ranges, slices, strict=True):
            at = 0
            for begin, end in ranges:
                whole.narrow(self.dim, begin, end - begin).copy_(piece.narrow(self.dim, at, end - begin))
                at += end - begin
        return whole

    def gather(self, value: torch.Tensor, group: _core.Group, label: str) -> torch.Tensor:
        """The whole on every rank, from the slice of each. Collective."""
        numels = [torch.Size(self.shape(rank)).numel() for rank in range(group.size)]
        sent = value.new_zeros(max(numels))
        sent[: value.numel()] = value.detach().reshape(-1)
        rows = sent.new_empty((group.size, sent.numel()))
        group.all_gather(rows.view(-1), sent, label)
        return self.join(
            [row[:n].view(self.shape(rank)) for rank, (row, n) in enumerate(zip(rows, numels, strict=True))]
        )

    def spec(self, rank: int) -> tuple[tuple[int, ...], int, tuple[Range, ...]]:
        """For a ParamSpec."""
        return self.sizes, self.dim, self.ranges[rank]
