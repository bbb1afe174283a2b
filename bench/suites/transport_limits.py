"""What collectives between ranks of one host must move, and how fast this host moves it."""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from measure import together

KIB, MIB = 1 << 10, 1 << 20
SHARED = "/dev/shm"  # files there are memory
CHUNK = 256 * KIB  # fits into a core's own cache, as what ranks hand each other does


@dataclass(frozen=True)
class Work:
    """What a rank has to copy in a call, of N ranks, in units of the buffer. `copies`: could it read what others have.
    Through shared memory: `own` from its own memory, to itself or to there, `crossing` what others have put there."""

    copies: Callable[[int], float]
    own: Callable[[int], float]
    crossing: Callable[[int], float]


WORK = {
    "all_reduce": Work(lambda n: (n + 1) / (2 * n) + 1, lambda n: (n - 1) / n + 1 / (2 * n), lambda n: 2 * (n - 1) / n),
    "reduce_scatter": Work(lambda n: (n + 1) / (2 * n), lambda n: (n - 1) / n, lambda n: (n - 1) / n),
    "all_gather": Work(lambda n: 1, lambda n: 2 / n, lambda n: (n - 1) / n),
    "all_to_all": Work(lambda n: 1, lambda n: 1, lambda n: (n - 1) / n),
}


def copy_limit(kind: str, ranks: int, one_copy: float) -> float:
    """Seconds; `one_copy` of the buffer takes that many."""
    return WORK[kind].copies(ranks) * one_copy


def floor(kind: str, ranks: int, size: int, one_copy: float, crossing: float) -> float:
    """Seconds through shared memory, where `crossing` bytes a second come from another rank."""
    return WORK[kind].own(ranks) * one_copy + WORK[kind].crossing(ranks) * size / crossing


def torch_copy(to: torch.Tensor, of: torch.Tensor) -> None:
    to.copy_(of)


def libc_copy(to: torch.Tensor, of: torch.Tensor) -> None:
    ctypes.memmove(to.data_ptr(), of.data_ptr(), of.nbytes)


COPIES = (torch_copy, libc_copy)


def shared_bytes(size: int, rank: int) -> torch.Tensor:
    """Memory that all ranks see; it goes with the last of them."""
    names = [""]
    if rank == 0:
        with tempfile.NamedTemporaryFile(dir=SHARED, prefix="tessera-bench-", delete=False) as file:
            file.truncate(size)
            names = [file.name]
    dist.broadcast_object_list(names)
    found = torch.from_file(names[0], shared=True, size=size, dtype=torch.uint8)
    together()
    if rank == 0:
        Path(names[0]).unlink()
    return found


def crossing_speed(ranks: int, rank: int) -> float:
    """Bytes a second at which a rank copies what the next one has just written, while all do; best of 100, of both ways
    to copy. Ranks that share a core take turns."""
    places = shared_bytes(ranks * CHUNK, rank).view(ranks, CHUNK)
    source, own = torch.ones(CHUNK, dtype=torch.uint8), torch.zeros(CHUNK, dtype=torch.uint8)
    best = 0.0
    for copy in COPIES:
        for _ in range(100):
            copy(places[rank], source)
            together()
            start = time.perf_counter()
            copy(own, places[(rank + 1) % ranks])
            best = max(best, CHUNK / (time.perf_counter() - start))
            together()
    return best / max(1.0, ranks / (os.cpu_count() or 1))
