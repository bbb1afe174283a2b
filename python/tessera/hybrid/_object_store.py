"""Tensors of a link through Ray's object store: a sender puts what a rank needs there, an actor hands the references on
to whom they are for."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tessera.hybrid._joining import C10D, has_ended

_LOOK = 0.25  # seconds between two looks at whether the sender is still there
_SMALL = 4096  # bytes that go with the call itself


class Relay:
    """The actor: keeps references until they are asked for, so that Ray counts them on their way and frees what they
    stand for as soon as it was taken."""

    def __init__(self) -> None:
        self._kept: dict[Any, asyncio.Future[list[Any]]] = {}

    async def keep(self, key: Any, reference: list[Any]) -> None:
        self._coming(key).set_result(reference)

    async def take(self, key: Any) -> list[Any]:
        """Waits until the value is there, and returns it; once."""
        reference = await self._coming(key)
        del self._kept[key]
        return reference

    def _coming(self, key: Any) -> asyncio.Future[list[Any]]:
        return self._kept.setdefault(key, asyncio.get_running_loop().create_future())


class RendezvousStore(C10D.PrefixStore):
    """The store of a Place, with the way to the relay of all groups of its program."""

    def __init__(self, prefix: str, store: Any, relay: Callable[[], Any]) -> None:
        super().__init__(prefix, store)
        self.rendezvous = prefix
        self.relay = relay


class ObjectStore:
    """Messages of rank `number` of a link, as the core sends and receives them. `link`: no other one of the relay
    has this name; `names` and `processes`: of all ranks, to say who has ended."""

    def __init__(
        self,
        relay: Any,
        link: str,
        number: int,
        names: Sequence[str],
        processes: Sequence[dict[str, Any]],
        timeout: float,
    ) -> None:
        import numpy  # Ray's way to hand memory on
        import ray

        self._numpy = numpy
        self._ray = ray
        self._relay = relay
        self._link = link
        self._number = number
        self._names = names
        self._processes = processes
        self._timeout = timeout
        self._counts: collections.Counter[tuple[int, int, int]] = collections.Counter()

    def send(self, data: torch.Tensor, to: int, tag: int) -> None:
        """Bytes on the CPU; waits for nobody."""
        message = data.numpy().tobytes() if data.numel() <= _SMALL else self._ray.put(data.numpy())
        self._relay.keep.remote(self._key(self._number, to, tag), [message])

    def receive(self, data: torch.Tensor, source: int, tag: int) -> None:
        """Fills `data` with the next message of that rank and tag."""
        deadline = time.monotonic() + self._timeout
        try:
            (message,) = self._wait(self._relay.take.remote(self._key(source, self._number, tag)), deadline, source)
            if not isinstance(message, bytes):
                message = self._wait(message, deadline, source)
            # A copy: what is in the object store must stay as it is.
            data.numpy()[:] = self._numpy.frombuffer(message, self._numpy.uint8)
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().split("\n", 1)[0]
            raise dist.DistBackendError(f"a message was lost on its way: {reason}") from None

    def _key(self, source: int, target: int, tag: int) -> Any:
        """The key of the next message."""
        way = (source, target, tag)
        self._counts[way] += 1
        return (self._link, *way, self._counts[way])

    def _wait(self, reference: Any, deadline: float, source: int) -> Any:
        while not self._ray.wait([reference], timeout=_LOOK)[0]:
            process = self._processes[source]
            if has_ended(process):
                raise dist.DistBackendError(f"{self._names[source]} (process {process['pid']}) has ended")
            if time.monotonic() > deadline:
                raise dist.DistBackendError(f"no message of {self._names[source]} within {self._timeout:g} s")
        return self._ray.get(reference)
