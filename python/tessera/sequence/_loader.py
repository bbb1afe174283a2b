"""Batches cut along the sequence."""

from __future__ import annotations

import collections
import json
import math
import struct
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tessera._nested import Nesting
from tessera.errors import ConfigError
from tessera.sequence._tiled import IGNORED

Batch = dict[str, Any]
_LENGTH = struct.Struct("<q")
_BATCHES = Nesting("SequenceLoader", "the batch holds", "ranks", "rank", ConfigError)


class SequenceLoader:
    """Micro-batches of `dl`, each rank's part of the sequence at a time.

    Every rank of `sp_group` has batches of its own, dicts of tensors [batch, sequence, ...] and other values (numbers,
    texts, None, and lists, tuples and dicts of them); all ranks go through rank 0's first, then through rank 1's and so
    on. A rank gets its part of dim 1 of every tensor that is as long as input_ids, all else whole. `labels` become
    `shift_labels`, moved by one token over the whole sequence (the last is -100), because a part of them cannot be
    moved; `attention_mask`, which a part could not use either, is left out: padding must be at the end. `position_ids`
    are required: they tell where a part lies, and packed sequences from each other.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl = dl
        self.sp_rank = sp_rank
        self.sp_group = sp_group
        self.sp_world_size = sp_world_size
        self.device = torch.device(device)
        self._iterator = iter(dl)
        self._ready: collections.deque[Batch] = collections.deque()

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
        """This rank's parts of the next batch of every rank. All ranks stop with the first one that does, and fail with
        one that fails: it with its own error, whatever that is, the others with what it says."""
        problem: Exception | None = None
        try:
            messages = [_packed(part) for part in cut_batch(next(self._iterator), self.sp_world_size)]
        except StopIteration:
            messages = [_packed(None)] * self.sp_world_size
        except Exception as error:
            problem = error
            text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            messages = [_packed((isinstance(error, ConfigError), text))] * self.sp_world_size
        received = self._exchange(messages)
        if problem is not None:
            raise problem
        for rank, message in enumerate(received):
            if isinstance(message, tuple):
                of_configuration, text = message
                if of_configuration:
                    raise ConfigError(text)
                raise RuntimeError(
                    f"[SequenceLoader] the batch of rank {rank} of the sequence could not be had: {text}"
                )
        if any(message is None for message in received):
            self._iterator = iter(self.dl)
            raise StopIteration
        return [
            {key: v.to(self.device) if isinstance(v, torch.Tensor) else v for key, v in batch.items()}
            for batch in received
        ]

    def _exchange(self, messages: list[bytes]) -> list[Any]:
        """messages[r] goes to rank r; what came, by rank."""
        if self.sp_world_size == 1:
            return [_unpacked(message) for message in messages]
        lengths = [len(message) for message in messages]
        sent = torch.tensor(lengths, device=self.device)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent, group=self.sp_group)
        sizes = came.tolist()
        payload = torch.frombuffer(bytearray(b"".join(messages)), dtype=torch.uint8).to(self.device)
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        dist.all_to_all_single(buffer, payload, sizes, lengths, group=self.sp_group)
        return [_unpacked(part.cpu().numpy().tobytes()) for part in buffer.split(sizes)]


def _packed(value: Any) -> bytes:
    """A message: its head in JSON, after the head's length; and the bytes of the tensors that it lists."""
    tensors, note = _BATCHES.split(value)
    rows = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    head = json.dumps({"note": note, "tensors": rows}).encode()
    return b"".join((_LENGTH.pack(len(head)), head, *map(_bytes_of, tensors)))


def _bytes_of(tensor: torch.Tensor) -> bytes:
    if tensor.layout != torch.strided:
        raise ConfigError(f"[SequenceLoader] the batch holds a tensor of the layout {tensor.layout}; make it dense")
    flat = tensor.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes()


def _unpacked(message: bytes) -> Any:
    begin = _LENGTH.size + _LENGTH.unpack_from(message)[0]
    head, tensors = json.loads(message[_LENGTH.size : begin]), []
    for name, shape in head["tensors"]:
        dtype: torch.dtype = getattr(torch, name)
        end = begin + math.prod(shape) * dtype.itemsize
        data = bytearray(message[begin:end])
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        tensors.append(flat.reshape(shape))
        begin = end
    return _BATCHES.join(head["note"], tensors)


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
