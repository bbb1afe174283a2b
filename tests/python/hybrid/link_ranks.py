"""Ranks of both sides of a link, as threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support import run_ranks
from tessera.hybrid import Layout, Link, Receiver, Sender

# Ray's workers otherwise leave a busy machine to everybody else (niceness 15).
RAY_ENVIRONMENT = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


def both_sides(
    link: Link,
    source: Callable[[Sender, int], Any],
    target: Callable[[Receiver, int], Any],
    store: Any = None,
) -> tuple[list[Any], list[Any]]:
    """source(sender, rank) and target(receiver, rank) on all ranks; their results. The first error is raised."""
    store = dist.HashStore() if store is None else store

    def body(place: int, _: Any) -> Any:
        if place < link.source.ranks:
            with link.sender(store, place) as sender:
                return source(sender, place)
        rank = place - link.source.ranks
        with link.receiver(store, rank) as receiver:
            return target(receiver, rank)

    results = run_ranks(link.source.ranks + link.target.ranks, body)
    return results[: link.source.ranks], results[link.source.ranks :]


def split(whole: torch.Tensor, layout: Layout, rank: int, batch_dim: int, sequence_dim: int | None) -> torch.Tensor:
    """What a rank of `layout` has of a tensor: nearly equal parts, as torch.tensor_split cuts."""
    batch, place = divmod(rank // layout.replicas, layout.sequence)
    mine = torch.tensor_split(whole, layout.batch, batch_dim)[batch]
    return mine if sequence_dim is None else torch.tensor_split(mine, layout.sequence, sequence_dim)[place]
