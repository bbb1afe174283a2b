"""Slices of parameters."""

from __future__ import annotations

import torch
from support import run_ranks
from tessera.parallel._cuts import ParamCut

import tessera


def test_slices_join_to_the_whole() -> None:
    whole = torch.arange(60.0).view(3, 10, 2)
    # Two sub-parameters of 6 and 4, cut unevenly over three ranks, of which the last gets nothing.
    cut = ParamCut((3, 10, 2), 1, (((0, 4), (6, 9)), ((4, 6), (9, 10)), ((0, 0),)))

    def body(rank: int, group: tessera.Group) -> None:
        mine = cut.take(whole, rank)
        assert mine.shape == cut.shape(rank) and mine.is_contiguous()
        assert mine.untyped_storage().nbytes() == 4 * mine.numel()
        assert cut.gather(mine, group, "test").equal(whole)

    run_ranks(3, body)
    assert cut.take(whole, 0)[:, 4:].equal(whole[:, 6:9])
    assert cut.spec(1) == ((3, 10, 2), 1, ((4, 6), (9, 10)))
