"""Batches cut along the sequence."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from tessera import _core
from tessera._mesh import OneGroup, core_group
from tessera._nested import Nesting
from tessera.errors import ConfigError

Batch = dict[str, Any]
Part = tuple[list[torch.Tensor], str]  # tensors, and how they are nested
_BATCHES = Nesting("SequenceLoader", "the batch holds", "ranks", "rank", ConfigError)


class Batches(Protocol):
    """A loader of such dicts."""

    def __iter__(self) -> Iterator[Batch]: ...
    def __len__(self) -> int: ...


class SequenceLoader:
    """Micro-batches of `dl`, each rank's part of the sequence at a time.

    Every rank of `sp_group` has batches of its own, dicts of tensors [batch, sequence, ...] and other values (numbers,
    texts, None, and lists, tuples and dicts of them); all ranks go through rank 0's first, then through rank 1's and so
    on. A rank gets its part of dim 1 of every tensor that is as long as input_ids, all else whole. `labels` become
    `shift_labels`, moved by one token over the whole sequence (the last is -100), because a part of them cannot be
    moved; `attention_mask`, which a part could not use either, is left out: padding must be at the end. `position_ids`
    are required: they tell where a part lies, and packed sequences from each other.
    """

    def __init__(
        self, dl: Batches, sp_rank: int, sp_group: OneGroup | None, sp_world_size: int, device: torch.device | str | int
    ) -> None:
        self.dl = dl
        self.sp_rank = sp_rank
        self.sp_group = sp_group
        self.sp_world_size = sp_world_size
        self.device = torch.device(device)
        self._iterator = iter(dl)
        self._ready: collections.deque[Batch] = collections.deque()
        self._ranks: _core.Group | None = None  # ranks of sp_group, once they have met

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Starts again after its end. A collective over sp_group for the first of sp_world_size micro-batches."""
        if not self._ready:
            self._ready.extend(self._deal())
        return self._ready.popleft()

    def _deal(self) -> list[Batch]:
        """Returns this rank's parts of the next batch of every rank. All ranks stop with the first one that does, and
        fail with one that fails: that rank with its own error, whatever it is, the others with what it says."""
        problem: Exception | None = None
        text = ""
        parts: list[Part] = []
        try:
            parts = [_taken_apart(part) for part in cut_batch(next(self._iterator), self.sp_world_size)]
        except StopIteration:
            pass
        except Exception as error:
            problem = error
            text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        if self._ranks is None:
            self._ranks = _core.single_group() if self.sp_world_size == 1 else core_group(self.sp_group)
        dealt = _core.deal(self._ranks, parts, text, isinstance(problem, ConfigError), self.device)
        if problem is not None:
            raise problem
        if dealt is None:
            self._iterator = iter(self.dl)
            raise StopIteration
        return [_BATCHES.join(note, tensors) for tensors, note in dealt]


def _taken_apart(part: Batch) -> Part:
    tensors, note = _BATCHES.split(part)
    _core.check_dense(tensors)
    return tensors, note


def cut_batch(batch: Batch, ranks: int) -> Iterator[Batch]:
    """The parts of `batch` for each of `ranks`, as SequenceLoader describes them."""
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    others = {key: value for key, value in batch.items() if key not in tensors}
    for part in _core.cut_batch(tensors, ranks, list(others)):
        yield {**others, **part}
