"""What both ends of a link have: the mailbox and the post, and the end of a step."""

from __future__ import annotations

from collections.abc import Hashable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tessera import _core
from tessera._device import group_timeout
from tessera._nested import Nesting
from tessera.distributed import DEFAULT_TIMEOUT
from tessera.errors import ConfigError, UsageError
from tessera.hybrid._layout import Box, Layout
from tessera.hybrid._mailbox import Mailbox, Peer
from tessera.hybrid._messages import Header, Post

if TYPE_CHECKING:
    from tessera.hybrid._link import Link

SIDES = ("source", "target")
VALUES = Nesting("hybrid", "outputs hold", "ranks", "rank", ConfigError)


class End:
    """What both ends of a link have."""

    def __init__(self, link: Link, side: str, store: Any, rank: int, engine: Any) -> None:
        self.link = link
        self.rank = rank
        self._side = side
        self._layouts = dict(zip(SIDES, (link.source, link.target), strict=True))
        layout = self._layouts[side]
        names = {key: f"{name} (link '{link.name}')" for key, name in zip(SIDES, link.sides, strict=True)}
        if not 0 <= rank < layout.ranks:
            raise ConfigError(f"[hybrid] rank {rank} of {names[side]}: there are {layout.ranks} ranks")
        if engine is not None and Layout.of(engine) != layout:
            raise ConfigError(f"[hybrid] {names[side]} is {layout}, but the mesh of its engine is {Layout.of(engine)}")
        self._engine = engine
        timeout = (group_timeout() or DEFAULT_TIMEOUT).total_seconds() if link.timeout is None else link.timeout
        self._mailbox = Mailbox(store, f"link/{link.name}", (side, rank), names, timeout)
        self._post = Post(self._mailbox, self._layouts, link.transport, timeout)
        self._part = rank // layout.replicas
        self._number = 0  # of the next message
        self._step = 0
        self._since = 0  # messages since the last step()
        self.hands_over = False  # its other end is of this process
        self._name = self._mailbox.name((side, rank))
        self._me = f"[hybrid] {self._name}"  # begins errors

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()

    def abort(self, reason: str) -> None:
        """Whoever waits for this rank, now or later, raises DistBackendError with `reason`."""
        self._mailbox.abort(reason)

    def close(self) -> None:
        """Waits until the other side has taken what was sent to it, if its processes run."""
        if not self._mailbox.aborted:
            self._post.flush()

    def _peers(self) -> list[tuple[str, int]]:
        other = SIDES[self._side == "source"]
        return [(other, rank) for rank in range(self._layouts[other].ranks)]

    def _outstanding(self) -> list[Hashable]:
        """Samples whose gradients have not come or gone back."""
        raise NotImplementedError

    def step(self) -> None:
        """Call it once for each optimizer step, on all ranks of both sides: checks that they had the same number of
        messages and that all gradients went back. Collective over both sides."""
        if self.hands_over:  # it would wait for itself
            raise UsageError(f"{self._me}: ends of hand_over() have no step(); leave it out")
        left = self._outstanding()
        if left:
            call = "backward" if self._side == "source" else "give_back"
            raise UsageError(
                f"{self._me}: step {self._step} ends, but the gradients of samples {left} are still out; call "
                f"{call}() for each before step()"
            )
        self._mailbox.put(self._ended(self._side, self.rank), self._since)
        for side, rank in self._peers():
            note = self._mailbox.take(self._ended(side, rank), (side, rank), f"word that step {self._step} has ended")
            if note != self._since:
                raise UsageError(
                    f"{self._me}: {self._mailbox.name((side, rank))} had {note} micro-batches in step {self._step}, "
                    f"this rank {self._since}"
                )
        self._mailbox.drop(f"ended/{self._step - 1}/{self._side}/{self.rank}")
        self._step += 1
        self._since = 0

    def _ended(self, side: str, rank: int) -> str:
        return f"ended/{self._step}/{side}/{rank}"

    def _still_in_step(self, what: str, need: int, of: Peer | None = None) -> None:
        """Raises where a peer (`of`: that one) has ended the step with fewer than `need` messages, or (0) at all."""
        for side, rank in self._peers() if of is None else [of]:
            note = self._mailbox.peek(self._ended(side, rank))
            if note is not None and (need == 0 or note < need):
                raise UsageError(
                    f"{self._me} waits for {what}, but {self._mailbox.name((side, rank))} has ended step "
                    f"{self._step} after {note} micro-batches"
                )


def wholes(link: Link, headers: list[Header], where: str) -> list[tuple[list[int], list[Box]]]:
    """Of each tensor of a message: its sizes, and what each part of the source has."""
    count = len(headers[0].metas)
    if any(len(header.metas) != count for header in headers):
        raise ConfigError(f"[hybrid] {where}: ranks of {link.sides[0]} sent {[len(x.metas) for x in headers]} tensors")
    return [
        _core.whole_boxes(link.source, link.dims, [header.metas[i].shape for header in headers], where)
        for i in range(count)
    ]


def samples_of(link: Link, headers: list[Header]) -> list[int] | None:
    """The rows of all samples, in the order of the batches."""
    rows = headers[:: link.source.sequence]
    if any(header.samples is None for header in rows):
        return None
    return [size for header in rows for size in header.samples or ()]
