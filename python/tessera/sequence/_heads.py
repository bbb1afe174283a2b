"""Which heads of attention a rank of a sequence-parallel group gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tessera.errors import ConfigError


def shard_sizes(total: int, ranks: int) -> list[int]:
    """Nearly equal parts, the larger ones first."""
    return [total // ranks + (rank < total % ranks) for rank in range(ranks)]


@dataclass
class HeadSplit:
    """`queries`, `keys`: heads of each rank. `sent`: which key/value heads these are, rank by rank, where some go to
    several ranks (None: each to one, in order). `local`: on which of its key/value heads each query head of a rank
    works, where that is not the usual n-th group (None: it is)."""

    queries: list[int]
    keys: list[int]
    sent: list[int] | None
    local: list[list[int] | None]


def split_heads(queries: int, keys: int, ranks: int, name: str = "DistributedAttention") -> HeadSplit:
    """Key/value heads are dealt out with the query heads that use them; where there are fewer of them than ranks, each
    goes to every rank that has a query head of it. ConfigError where a rank would have none."""
    if keys < 1 or queries % keys:
        raise ConfigError(f"[{name}] {queries} query heads are no multiple of {keys} key/value heads")
    if queries < ranks:
        raise ConfigError(
            f"[{name}] {queries} query heads cannot be dealt out to {ranks} sequence-parallel ranks: each needs one at "
            "least; "
            f"use a sequence_parallel_size of {queries} at most"
        )
    group = queries // keys
    if keys >= ranks:
        counts = shard_sizes(keys, ranks)
        return HeadSplit([count * group for count in counts], counts, None, [None] * ranks)
    counts = shard_sizes(queries, ranks)
    split = HeadSplit(counts, [], [], [])
    begin = 0
    for count in counts:
        used = [head // group for head in range(begin, begin + count)]
        heads = sorted(set(used))
        split.keys.append(len(heads))
        split.sent = [*(split.sent or []), *heads]
        usual = count % len(heads) == 0 and used == [heads[k // (count // len(heads))] for k in range(count)]
        split.local.append(None if usual else [heads.index(head) for head in used])
        begin += count
    return split


def pick(tensor: torch.Tensor, heads: list[int] | None, dim: int) -> torch.Tensor:
    """The given heads of `tensor`; all of it where None."""
    if heads is None:
        return tensor
    return tensor.index_select(dim, torch.tensor(heads, device=tensor.device))
