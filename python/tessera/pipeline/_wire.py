"""What stages send each other: values of any nesting of tensors, in messages that say of themselves what they are.

A message is a header of HEADER numbers, the form of the value where it is another than that of the message before, and
its tensors, as bytes. So shapes, dtypes and nesting may change from one message to the next, and cost nothing where
they do not.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tessera.errors import UsageError

HEADER = 3  # what it is (_VALUE, _FAILURE), number of the message's micro-batch times chunks, bytes of the form
_VALUE, _FAILURE = 0, 1


class StageFailed(RuntimeError):
    """Another stage could not go on in this batch; the message is its error."""


@dataclass(frozen=True)
class _Slot:
    """A tensor's place in a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


def fold(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with a _Slot in place of every tensor, which are appended to `tensors` in order."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Slot(tuple(value.shape), value.dtype, value.requires_grad)
    if isinstance(value, dict):
        return {key: fold(item, tensors) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(fold(item, tensors) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(fold(item, tensors) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UsageError(
        f"[pipeline] a layer returned a {type(value).__name__}; between stages go tensors, numbers, texts, None, "
        "and tuples, lists and dicts of them"
    )


def unfold(form: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The value that fold() took apart."""
    if isinstance(form, _Slot):
        return next(tensors)
    if isinstance(form, dict):
        return {key: unfold(item, tensors) for key, item in form.items()}
    if isinstance(form, tuple) and hasattr(form, "_fields"):
        return type(form)(*(unfold(item, tensors) for item in form))
    if isinstance(form, (tuple, list)):
        return type(form)(unfold(item, tensors) for item in form)
    return form


def slots_of(form: Any) -> list[_Slot]:
    if isinstance(form, _Slot):
        return [form]
    parts = form.values() if isinstance(form, dict) else form if isinstance(form, (tuple, list)) else ()
    return [slot for part in parts for slot in slots_of(part)]


def tensors_of(value: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    fold(value, tensors)
    return tensors


@dataclass
class Peer:
    """The other end of a wire."""

    rank: int  # among all processes
    stage: int

    def __str__(self) -> str:
        return f"stage {self.stage} (rank {self.rank})"


class Wire:
    """One direction of messages from this stage to another or from another to this. `group`: of torch; messages of
    other directions are in other groups, so that their order is their own."""

    def __init__(self, group: dist.ProcessGroup, peer: Peer, device: torch.device, what: str) -> None:
        self.peer = peer
        self._group = group
        self._device = device
        self._what = what  # in words, for errors
        self._form_bytes = b""
        self._form: Any = None
        self._under_way: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self.forms = 0  # messages that had to say what form they have

    # ---------------------------------------------------------------- sending

    def send(self, value: Any, number: int) -> None:
        """Returns at once; what is sent is kept until it has arrived."""
        tensors: list[torch.Tensor] = []
        text = pickle.dumps(fold(value, tensors))
        changed = text != self._form_bytes
        self._put(torch.tensor([_VALUE, number, len(text) if changed else 0]))
        if changed:
            self._form_bytes = text
            self.forms += 1
            self._put(_bytes(text))
        for tensor in tensors:
            if tensor.numel():
                self._put(tensor.detach().contiguous().reshape(-1).view(torch.uint8))

    def send_failure(self, text: str) -> None:
        """In place of the next message: this stage cannot go on."""
        data = text.encode()
        self._put(torch.tensor([_FAILURE, 0, len(data)]))
        self._put(_bytes(data))

    def flush(self) -> None:
        """Until all that was sent has arrived; where another stage may have failed, nobody may take it."""
        while self._under_way:
            self._wait(self._under_way.popleft()[0])

    def _put(self, tensor: torch.Tensor) -> None:
        while self._under_way and self._under_way[0][0].is_completed():
            self._wait(self._under_way.popleft()[0])
        tensor = tensor.to(self._device)
        try:
            work = dist.isend(tensor, self.peer.rank, self._group)
        except RuntimeError as error:
            raise self._lost(error) from error
        assert work is not None
        self._under_way.append((work, tensor))

    # ---------------------------------------------------------------- receiving

    def receive(self, number: int) -> Any:
        """The next message's value: tensors on the device, leaves that require a gradient where the sender's do."""
        kind, sent, size = self._take((HEADER,), torch.int64).tolist()
        if kind == _FAILURE:
            text = self._take((size,), torch.uint8).cpu().numpy().tobytes().decode()
            raise StageFailed(text)
        if sent != number:
            raise UsageError(
                f"[pipeline] {self.peer} sent {self._what} number {sent} where this stage expects number {number}: its "
                "schedule is another; build the engine with the same configuration on all ranks"
            )
        if size:
            self._form_bytes = self._take((size,), torch.uint8).cpu().numpy().tobytes()
            self._form = pickle.loads(self._form_bytes)
            self.forms += 1
        return unfold(self._form, (self._tensor(slot) for slot in slots_of(self._form)))

    def _tensor(self, slot: _Slot) -> torch.Tensor:
        tensor = torch.empty(slot.shape, dtype=slot.dtype, device=self._device)
        if tensor.numel():
            self._fill(tensor.view(-1).view(torch.uint8))
        return tensor.requires_grad_(slot.needs_grad)

    def _take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self._fill(tensor)
        return tensor

    def _fill(self, tensor: torch.Tensor) -> None:
        try:
            work = dist.irecv(tensor, self.peer.rank, self._group)
        except RuntimeError as error:
            raise self._lost(error) from error
        assert work is not None
        self._wait(work)

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> dist.DistBackendError:
        return dist.DistBackendError(
            f"[pipeline] {self.peer} is lost, or did not answer in time, while {self._what} were under way; see its "
            f"own output for the reason ({str(error).splitlines()[0]})"
        )


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
