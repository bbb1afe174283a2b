"""Batches cut along the sequence."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tessera import _core
from tessera._mesh import OneGroup, core_group
from tessera._nested import Form, Nesting, as_bytes, bytes_of, form_of, from_bytes
from tessera.errors import ConfigError
from tessera.sequence._tiled import IGNORED

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
        parts: list[Part] = []
        try:
            parts = [_taken_apart(part) for part in cut_batch(next(self._iterator), self.sp_world_size)]
            own: Any = [[note, [form_of(t) for t in tensors]] for tensors, note in parts]
        except StopIteration:
            own = None
        except Exception as error:
            problem = error
            text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            own = {"of_configuration": isinstance(error, ConfigError), "text": text}
        all_own = self._values_of_all(own)
        if problem is not None:
            raise problem
        for rank, theirs in enumerate(all_own):
            if isinstance(theirs, dict):
                if theirs["of_configuration"]:
                    raise ConfigError(theirs["text"])
                raise RuntimeError(
                    f"[SequenceLoader] the batch of rank {rank} of the sequence could not be had: {theirs['text']}"
                )
        if any(theirs is None for theirs in all_own):
            self._iterator = iter(self.dl)
            raise StopIteration
        came = [theirs[self.sp_rank] for theirs in all_own]
        tensors = self._exchange([tensors for tensors, _ in parts], [forms for _, forms in came])
        return [_BATCHES.join(note, theirs) for (note, _), theirs in zip(came, tensors, strict=True)]

    def _values_of_all(self, own: Any) -> list[Any]:
        """Returns what each rank passes, as JSON can say it."""
        if self._ranks is None:
            self._ranks = _core.single_group() if self.sp_world_size == 1 else core_group(self.sp_group)
        texts = _core.texts_of(self._ranks, json.dumps(own), "parts of batches", self.device)
        return [json.loads(text) for text in texts]

    def _exchange(self, tensors: list[list[torch.Tensor]], forms: list[list[Form]]) -> list[list[torch.Tensor]]:
        """tensors[r] go to rank r; what came, by rank, of the dtypes and shapes in `forms`."""
        moved = [[t.detach().to(self.device) for t in of_rank] for of_rank in tensors]
        if self.sp_world_size == 1:
            return moved
        sent = [as_bytes(of_rank, self.device) for of_rank in moved]
        coming = [bytes_of(of_rank) for of_rank in forms]
        buffer = torch.empty(sum(coming), dtype=torch.uint8, device=self.device)
        lengths = [part.numel() for part in sent]
        dist.all_to_all_single(buffer, torch.cat(sent), coming, lengths, group=self.sp_group)
        return [from_bytes(data, of_rank) for data, of_rank in zip(buffer.split(coming), forms, strict=True)]


def _taken_apart(part: Batch) -> Part:
    tensors, note = _BATCHES.split(part)
    for t in tensors:
        if t.layout != torch.strided:
            raise ConfigError(f"[SequenceLoader] the batch holds a tensor of the layout {t.layout}; make it dense")
    return tensors, note


def cut_batch(batch: Batch, ranks: int) -> Iterator[Batch]:
    """The parts of `batch` for each of `ranks`, as SequenceLoader describes them."""
    for key in ("input_ids", "position_ids"):
        if key not in batch:
            raise ConfigError(
                f"[SequenceLoader] the batch has no {key}, only {', '.join(sorted(batch))}"
                + ("; a part of a sequence cannot know where it lies without them" if key == "position_ids" else "")
            )
    length = batch["input_ids"].size(1)
    if length % ranks:
        raise ConfigError(
            f"[SequenceLoader] a batch of {length} tokens a sequence is not divisible by the {ranks} ranks "
            "of "
            f"sequence_parallel_size; pad it to {(length // ranks + 1) * ranks}"
        )
    batch = dict(batch)
    _check_padding(batch.pop("attention_mask", None))
    if "labels" in batch:
        labels = batch.pop("labels")
        batch["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    step = length // ranks
    for rank in range(ranks):
        yield {key: _part(value, length, rank * step, step) for key, value in batch.items()}


def _part(value: Any, length: int, begin: int, step: int) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() > 1 and value.size(1) == length:
        return value.narrow(1, begin, step)
    return value


def _check_padding(mask: Any) -> None:
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool((mask.bool()[:, 1:] & ~mask.bool()[:, :-1]).any()):
        raise ConfigError(
            "[SequenceLoader] attention_mask has zeros before ones; with sequence parallelism padding must "
            "be at the "
            "end (padding_side='right'), packed sequences are told by position_ids"
        )
