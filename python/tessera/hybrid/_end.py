"""What both ends of a link have in Python: the ranks' rendezvous, and the end in the core (tessera/pipeline/link.h)."""

from __future__ import annotations

from collections.abc import Hashable
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

from tessera import _core
from tessera._device import group_timeout
from tessera._nested import Nesting
from tessera.distributed import DEFAULT_TIMEOUT
from tessera.errors import ConfigError, UsageError
from tessera.hybrid._joining import C10D, Joining, Store
from tessera.hybrid._layout import SIDES, HasCore, Layout, Terms

VALUES = Nesting("hybrid", "outputs hold", "ranks", "rank", ConfigError)

E = TypeVar("E", bound="End")


class End:
    """What both ends of a link have."""

    def __init__(
        self, link: Terms, side: str, kind: type[Any], store: Store, rank: int, engine: HasCore | None
    ) -> None:
        self.link = link
        self.rank = rank
        layout = link.source if side == "source" else link.target
        sides = tuple(f"{name} (link '{link.name}')" for name in link.sides)
        name = sides[SIDES.index(side)]
        if not 0 <= rank < layout.ranks:
            raise ConfigError(f"[hybrid] rank {rank} of {name}: there are {layout.ranks} ranks")
        if engine is not None and Layout.of(engine) != layout:
            raise ConfigError(f"[hybrid] {name} is {layout}, but the mesh of its engine is {Layout.of(engine)}")
        counts = (link.source.ranks, link.target.ranks)
        names = [f"rank {r} of {part}" for part, count in zip(sides, counts, strict=True) for r in range(count)]
        number = rank if side == "source" else link.source.ranks + rank
        if link.transport == "ray" and not hasattr(store, "relay"):
            raise UsageError(
                f'[hybrid] {names[number]}: transport="ray" is for links of actor groups; make the end with '
                "place.store() of a Program's actor"
            )
        timeout = (group_timeout() or DEFAULT_TIMEOUT).total_seconds() if link.timeout is None else link.timeout

        core = None if engine is None else engine.core

        def connect(rendezvous: Any, processes: list[dict[str, Any]]) -> Any:
            p2p: Any
            if link.transport == "ray":
                from tessera.hybrid._object_store import ObjectStore

                own: Any = store  # a RendezvousStore
                channel = ObjectStore(own.relay(), f"{own.rendezvous}/{link.name}", number, names, processes, timeout)
                p2p = _core.PythonPointToPoint(number, len(names), channel)
            else:
                wait = timedelta(seconds=timeout)
                p2p = _core.store_point_to_point(rendezvous, number, len(names), wait, link.transport == "auto")
            return kind(link.source, link.target, link.dims, sides, rank, p2p, core)

        self._joining = Joining(C10D.PrefixStore(f"link/{link.name}", store), names, number, timeout, connect)
        self._me = f"[hybrid] {names[number]}"  # begins errors

    def __enter__(self: E) -> E:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()

    def abort(self, reason: str) -> None:
        """Whoever waits for this rank, now or later, raises DistBackendError with `reason`."""
        self._joining.abort(reason)

    def close(self) -> None:
        """Waits until the other side has taken what was sent to it, if its processes run. Nothing can be done with the
        end after it."""
        self._joining.close()

    def step(self) -> None:
        """Call it once for each optimizer step, on all ranks of both sides: checks that they had the same number of
        messages and that all gradients went back. Collective over both sides."""
        self._joining.call("word that a step has ended", "step")


def text_of(sample: Hashable) -> str:
    """A sample as it travels: equal for equal numbers, texts, and tuples of them."""
    return repr(sample)
