"""Tensors of a link through Ray's object store: a sender puts what a rank needs there, an actor hands the references on
to whom they are for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tessera.hybrid._mailbox import C10D

_LOOK = 0.25  # seconds between two looks at whether the sender is still there


class Exchange:
    """The actor: keeps references until they are asked for, so that Ray counts them on their way and frees what they
    stand for as soon as it was taken."""

    def __init__(self) -> None:
        self._kept: dict[Any, asyncio.Future[list[Any]]] = {}

    async def keep(self, key: Any, reference: list[Any]) -> None:
        self._place(key).set_result(reference)

    async def take(self, key: Any) -> list[Any]:
        """Waits until it is there; once."""
        reference = await self._place(key)
        del self._kept[key]
        return reference

    def _place(self, key: Any) -> asyncio.Future[list[Any]]:
        return self._kept.setdefault(key, asyncio.get_running_loop().create_future())


class MeetingStore(C10D.PrefixStore):
    """The store of a Place, with the way to the exchange of all groups of its program."""

    def __init__(self, prefix: str, store: Any, exchange: Callable[[], Any]) -> None:
        super().__init__(prefix, store)
        self.meeting = prefix
        self.exchange = exchange


class ObjectStore:
    """Sends between ranks of a link as _messages.Wire does. `name`: the link's, of no other one of the exchange."""

    def __init__(self, exchange: Any, name: str, rank: int, timeout: float) -> None:
        import ray

        self._ray = ray
        self._exchange = exchange
        self._name = name
        self._rank = rank
        self._timeout = timeout

    def send(self, data: torch.Tensor, to: int, tag: int, key: str) -> None:
        reference = self._ray.put(data.numpy())
        self._exchange.keep.remote((self._name, self._rank, to, tag), [reference])

    def taken(self, key: str) -> None:
        """Ray has freed it."""

    def receive(self, data: torch.Tensor, source: int, tag: int, where: str, look: Callable[[], None]) -> None:
        deadline = time.monotonic() + self._timeout
        try:
            (reference,) = self._wait(
                self._exchange.take.remote((self._name, source, self._rank, tag)), deadline, where, look
            )
            # A copy: what is in the object store must stay as it is.
            data.numpy()[:] = self._wait(reference, deadline, where, look)
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().split("\n", 1)[0]
            raise dist.DistBackendError(f"[hybrid] {where} was lost on its way: {reason}") from None

    def _wait(self, reference: Any, deadline: float, where: str, look: Callable[[], None]) -> Any:
        while not self._ray.wait([reference], timeout=_LOOK)[0]:
            look()
            if time.monotonic() > deadline:
                raise dist.DistBackendError(f"[hybrid] {where} did not arrive within {self._timeout:g} s")
        return self._ray.get(reference)
