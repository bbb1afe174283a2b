"""Which slice of a whole parameter each rank of a tensor-parallel group holds."""

from __future__ import annotations

import dataclasses

import torch

from tessera import _core

Range = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ParamCut:
    sizes: tuple[int, ...]  # of the whole
    dim: int  # along which it is cut
    ranges: tuple[tuple[Range, ...], ...]  # by rank: ranges of that dim, joined in this order

    def length(self, rank: int) -> int:
        return sum(end - begin for begin, end in self.ranges[rank])

    def shape(self, rank: int) -> tuple[int, ...]:
        return (*self.sizes[: self.dim], self.length(rank), *self.sizes[self.dim + 1 :])

    def take(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """The slice of `rank`, contiguous, in new memory."""
        return _core.take_slice(whole.detach(), self.spec(rank))

    def gather(self, value: torch.Tensor, group: _core.Group, label: str) -> torch.Tensor:
        """The whole on every rank, from the slice of each. Collective."""
        slice_ = value.detach().reshape(self.shape(group.rank))
        return _core.join_slices(slice_, self.spec(group.rank), group, label)

    def spec(self, rank: int) -> tuple[tuple[int, ...], int, tuple[Range, ...]]:
        """The cut as a ParamSpec takes it."""
        return self.sizes, self.dim, self.ranges[rank]
