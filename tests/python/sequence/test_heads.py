"""Which heads a rank gets."""

from __future__ import annotations

from typing import Any

import pytest
from tessera.sequence._heads import shard_sizes, split_heads

# query heads, key/value heads, ranks -> heads of each rank, key/value heads of each, those sent, those not in groups
SPLITS: list[tuple[tuple[int, int, int], tuple[Any, ...]]] = [
    ((8, 8, 4), ([2, 2, 2, 2], [2, 2, 2, 2], None, {})),
    ((6, 6, 4), ([2, 2, 1, 1], [2, 2, 1, 1], None, {})),
    ((8, 4, 4), ([2, 2, 2, 2], [1, 1, 1, 1], None, {})),
    ((12, 6, 4), ([4, 4, 2, 2], [2, 2, 1, 1], None, {})),
    ((8, 2, 4), ([2, 2, 2, 2], [1, 1, 1, 1], [0, 0, 1, 1], {})),
    ((8, 1, 3), ([3, 3, 2], [1, 1, 1], [0, 0, 0], {})),
    # The second of three ranks has one head of the first group and two of the second.
    ((8, 2, 3), ([3, 3, 2], [1, 2, 1], [0, 0, 1, 1], {1: [0, 1, 1]})),
]


@pytest.mark.parametrize(("numbers", "expected"), SPLITS)
def test_heads_of_each_rank(numbers: tuple[int, int, int], expected: tuple[Any, ...]) -> None:
    queries, keys, sent, local = expected
    split = split_heads(*numbers)
    assert (split.queries, split.keys, split.sent) == (queries, keys, sent)
    assert {rank: heads for rank, heads in enumerate(split.local) if heads is not None} == local


def test_parts_are_nearly_equal() -> None:
    assert shard_sizes(10, 4) == [3, 3, 2, 2]
    assert shard_sizes(2, 3) == [1, 1, 0]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((3, 3, 4), "3 query heads cannot be dealt out to 4 sequence-parallel ranks.*sequence_parallel_size of 3"),
        ((6, 4, 2), "6 query heads are no multiple of 4 key/value heads"),
    ],
)
def test_heads_that_cannot_be_dealt_out(numbers: tuple[int, int, int], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        split_heads(*numbers)
