"""Messages of a link: a note in the store that says what there is, and the tensors in shared memory, or over a process
group to ranks of other hosts, or in Ray's object store."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tessera import _core
from tessera.hybrid._layout import Box, Layout, Sizes, inside, sizes_of
from tessera.hybrid._mailbox import Mailbox, Peer
from tessera.hybrid._memory import Segment, SegmentPlace, open_segment, view_of
from tessera.hybrid._object_store import ObjectStore


@dataclass(frozen=True)
class Meta:
    """A tensor of a message, as its rank has it."""

    dtype: torch.dtype
    shape: Sizes
    trained: bool  # a gradient is wanted back
    present: bool = True  # False: a gradient that is zero everywhere
    offset: int = 0  # in the segment


@dataclass(frozen=True)
class Header:
    """What one rank says of a message. `held`: of a gradient, what each part of the side that sent the tensors has of
    the whole, and `box` what this rank has."""

    sample: str  # text_of() it
    metas: tuple[Meta, ...]
    outputs: str = ""  # how the tensors are nested, see _nested.py
    samples: tuple[int, ...] | None = None
    held: tuple[tuple[Box, ...], ...] = ()
    box: tuple[Box, ...] = ()
    place: SegmentPlace | None = None

    def plain(self) -> dict[str, Any]:
        """For a note."""
        found = asdict(self)
        for meta in found["metas"]:
            meta["dtype"] = str(meta["dtype"]).removeprefix("torch.")
        return found

    @classmethod
    def from_plain(cls, found: dict[str, Any]) -> Header:
        metas = tuple(_meta_of(meta) for meta in found.pop("metas"))
        held = tuple(_boxes_of(boxes) for boxes in found.pop("held"))
        box = _boxes_of(found.pop("box"))
        samples, place = found.pop("samples"), found.pop("place")
        return cls(
            metas=metas,
            samples=None if samples is None else tuple(samples),
            held=held,
            box=box,
            place=None if place is None else SegmentPlace(**place),
            **found,
        )


def _meta_of(found: dict[str, Any]) -> Meta:
    dtype = getattr(torch, found["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise dist.DistBackendError(f"[hybrid] a message has a tensor of the dtype {found['dtype']!r}")
    return Meta(**found | {"dtype": dtype, "shape": tuple(found["shape"])})


def _boxes_of(found: Any) -> tuple[Box, ...]:
    return tuple([(begin, end) for begin, end in box] for box in found)


def text_of(sample: Hashable) -> str:
    """A sample as it travels: equal for equal numbers, texts, and tuples of them."""
    return repr(sample)


@dataclass(frozen=True)
class Message:
    """The headers of all parts of the other side, and where each part's tensors are: a mapped segment or a buffer that
    came over the process group."""

    headers: list[Header]
    sources: list[Any]


class Wire:
    """Sends between ranks of several hosts; all ranks of both sides make theirs at the same time."""

    def __init__(self, store: Any, rank: int, size: int, one_host: bool, timeout: float) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self._timeout = timedelta(seconds=timeout)
        device = gloo.create_device(hostname="127.0.0.1") if one_host else gloo.create_default_device()
        options._devices = [device]
        self._group: Any = gloo(store, rank, size, options)
        self._sent: dict[str, list[tuple[Any, torch.Tensor]]] = {}

    def send(self, data: torch.Tensor, to: int, tag: int, key: str) -> None:
        """Does not wait; `data` (bytes) must not change any more. It is kept until taken(key)."""
        self._sent.setdefault(key, []).append((self._group.send([data], to, tag), data))

    def taken(self, key: str) -> None:
        """All of the message has been received. Gloo says so of what it is asked to wait for, and of nothing else."""
        for work, _ in self._sent.pop(key, []):
            with contextlib.suppress(RuntimeError):  # a connection that broke after it was
                work.wait(self._timeout)

    def receive(self, data: torch.Tensor, source: int, tag: int, where: str, look: Callable[[], None]) -> None:
        """`look` raises where the sender is gone; here a connection that breaks says so."""
        try:
            self._group.recv([data], source, tag).wait(self._timeout)
        except RuntimeError as error:
            reason = str(error).split("\n", 1)[0]
            raise dist.DistBackendError(f"[hybrid] {where} was lost on its way: {reason}") from None


class Post:
    """Sends and takes the messages of one rank. Sending never waits for whoever is to take them."""

    def __init__(self, mailbox: Mailbox, layouts: dict[str, Layout], transport: str, timeout: float) -> None:
        self._mailbox = mailbox
        self._side, self._rank = mailbox.me
        self._other = next(side for side in layouts if side != self._side)
        self._layouts = layouts
        self._transport = transport
        self._timeout = timeout
        self._wire: Wire | ObjectStore | None = None
        self._wired: bool | None = None
        self._out: dict[str, tuple[Segment, int]] = {}  # not yet opened by all that will

    # ---------------------------------------------------------------- who reaches whom how

    def near(self, peer: Peer) -> bool:
        """Whether tensors go through memory."""
        process = self._mailbox.process_of(peer)
        return self._transport == "auto" and process.host == self._mailbox.process.host

    def wired(self) -> bool:
        """Whether any two ranks need more than memory: the same on all. Waits until all have come."""
        if self._wired is None:
            peers = [(side, rank) for side, layout in self._layouts.items() for rank in range(layout.ranks)]
            hosts = {self._mailbox.process_of(peer).host for peer in peers}
            self._wired = self._transport != "auto" or len(hosts) > 1
            self._one_host = len(hosts) == 1
            self._check_places(peers)
        return self._wired

    def _check_places(self, peers: list[Peer]) -> None:
        here = [p for p in peers if p[0] == self._other and self._mailbox.process_of(p) == self._mailbox.process]
        if self._wired and here and self._transport != "ray":  # it would wait for itself to join the process group
            raise NotImplementedError(
                "[hybrid] processes that have a rank of both sides of a link must all be on one host, with "
                'transport="auto", or have transport="ray"; put the sides on processes of their own'
            )

    def _group(self) -> Wire | ObjectStore:
        if self._wire is None and self._transport == "ray":
            place = self._number(self._mailbox.me)
            self._wire = ObjectStore(self._mailbox.exchange(), self._mailbox.link, place, self._timeout)
        if self._wire is None:
            size = sum(layout.ranks for layout in self._layouts.values())
            store = self._mailbox.store("wire")
            place = self._number(self._mailbox.me)
            self._wire = Wire(store, place, size, self._one_host, self._timeout)
        return self._wire

    def _number(self, peer: Peer) -> int:
        first = min(self._layouts)
        return peer[1] if peer[0] == first else self._layouts[first].ranks + peer[1]

    def _takers(self) -> list[int]:
        """Ranks of the other side that take this rank's part from it and not from a replica."""
        mine, other = self._layouts[self._side], self._layouts[self._other]
        return [rank for rank in range(other.ranks) if rank % mine.replicas == self._rank % mine.replicas]

    # ---------------------------------------------------------------- sending

    def announce(self, kind: str, header: Header, tensors: Sequence[torch.Tensor], readers: int = 0) -> None:
        """Puts a message where the other side finds it. `kind`: its name, the same on all ranks; `tensors`: those of
        the header's that are present; `readers`: ranks of this side that read the header, too."""
        self._sweep()
        takers = self._takers()
        if not takers and not readers:
            return
        segment = Segment(tensors if any(self.near((self._other, rank)) for rank in takers) else [])
        offsets = iter(segment.offsets)
        metas = tuple(replace(meta, offset=next(offsets, 0) if meta.present else 0) for meta in header.metas)
        key = f"{kind}/{self._rank}"
        self._out[key] = (segment, len(takers) + readers)
        self._mailbox.put(key, replace(header, metas=metas, place=segment.place).plain())

    def push(
        self,
        kind: str,
        metas: Sequence[Meta],
        tensors: Sequence[torch.Tensor],
        held: Sequence[Sequence[Box]],
        wanted_by: Callable[[int], Sequence[Box]],
    ) -> None:
        """The tensors of announce() to ranks that memory does not reach. Of each tensor, `held` is what the parts of
        this side have, `wanted_by(rank)` what a rank of the other side wants."""
        part = self._rank // self._layouts[self._side].replicas
        for rank in self._takers():
            if self.near((self._other, rank)):
                continue
            present = iter(tensors)
            data = []
            for meta, boxes, box in zip(metas, held, wanted_by(rank), strict=True):
                tensor = next(present) if meta.present else None
                common = _core.route(boxes, part, box)
                if tensor is not None and common is not None:
                    piece = tensor.detach()[inside(common, boxes[part])] if box else tensor.detach()
                    data.append(piece.cpu().contiguous().view(-1).view(torch.uint8))
            if data:
                key = f"{kind}/{self._rank}"
                self._group().send(torch.cat(data), self._number((self._other, rank)), _tag(kind), key)

    def _sweep(self) -> None:
        """Lets go of segments that all have opened."""
        for key, (segment, takers) in list(self._out.items()):
            if self._mailbox.count(f"taken/{key}", 0) >= takers:
                segment.close()
                if self._wire is not None:
                    self._wire.taken(key)
                del self._out[key]
                self._mailbox.drop(key)
                self._mailbox.drop(f"taken/{key}")

    def flush(self) -> None:
        """Waits until all that was sent is taken, as long as those run who will, and the link's timeout at most."""
        deadline = time.monotonic() + self._timeout
        self._sweep()
        while self._out and time.monotonic() < deadline and self._takers_run():
            time.sleep(0.01)
            self._sweep()

    def _takers_run(self) -> bool:
        return all(self._mailbox.runs((self._other, rank)) for rank in self._takers())

    # ---------------------------------------------------------------- taking

    def read(self, kind: str, what: str, check: Callable[[Peer], None], side: str | None = None) -> list[Header]:
        """The headers of all parts of the other side (or of `side`, but for this rank's own), in order."""
        side = side or self._other
        layout = self._layouts[side]
        headers = []
        for part in range(layout.parts):
            rank = layout.holder(part, self._rank)
            if side == self._side and part == self._rank // layout.replicas:
                rank = self._rank
            headers.append(Header.from_plain(self._mailbox.take(f"{kind}/{rank}", (side, rank), what, check)))
        return headers

    def taken(self, kind: str, side: str | None = None) -> None:
        """This rank needs the headers (and memory) of read() no more."""
        side = side or self._other
        layout = self._layouts[side]
        for part in range(layout.parts):
            if side != self._side or part != self._rank // layout.replicas:
                self._mailbox.count(f"taken/{kind}/{layout.holder(part, self._rank)}")

    def open(
        self, kind: str, headers: list[Header], held: Sequence[Sequence[Box]], wanted: Sequence[Box], what: str
    ) -> Message:
        """Reaches for the tensors of read() headers that this rank needs."""
        layout = self._layouts[self._other]
        sources: list[Any] = []
        for part, header in enumerate(headers):
            peer = (self._other, layout.holder(part, self._rank))
            commons = [
                _core.route(boxes, part, box) if meta.present else None
                for meta, boxes, box in zip(header.metas, held, wanted, strict=True)
            ]
            if all(common is None for common in commons):
                sources.append(None)
            elif self.near(peer):
                assert header.place is not None
                sources.append(open_segment(header.place, self._mailbox.name(peer)))
            else:
                sizes = [
                    0 if common is None else math.prod(sizes_of(common)) * meta.dtype.itemsize
                    for meta, common in zip(header.metas, commons, strict=True)
                ]
                data = torch.empty(sum(sizes), dtype=torch.uint8)
                where = f"{what} of {self._mailbox.name(peer)}"
                self._group().receive(
                    data, self._number(peer), _tag(kind), where, partial(self._mailbox.look, peer, what)
                )
                sources.append(list(data.split(sizes)))
        return Message(headers, sources)


def _tag(kind: str) -> int:
    """Forward and gradient of a message, as the process group knows them."""
    direction, number = kind.split("/")
    return (2 * int(number) + (direction == "back")) % (1 << 30)


def join(message: Message, index: int, held: Sequence[Box], wanted: Box, device: torch.device) -> torch.Tensor | None:
    """A tensor of a message as this rank wants it; a view of shared memory where one part has all of it. None for a
    gradient that is zero everywhere."""
    metas = [header.metas[index] for header in message.headers]
    found: list[tuple[Box, torch.Tensor]] = []
    for part, (meta, source) in enumerate(zip(metas, message.sources, strict=True)):
        common = _core.route(held, part, wanted) if meta.present else None
        if common is None:
            continue
        if isinstance(source, list):
            piece = source[index].view(meta.dtype).view(sizes_of(common))
        else:
            piece = view_of(source, meta.dtype, meta.shape, meta.offset)
            piece = piece[inside(common, held[part])] if common else piece
        found.append((common, piece))
    if not found and not any(meta.present for meta in metas):
        return None
    if len(found) == 1 and found[0][0] == wanted:
        return found[0][1].to(device)
    whole = torch.zeros(sizes_of(wanted), dtype=metas[0].dtype, device=device)
    for common, piece in found:
        whole[inside(common, wanted)] = piece.to(device)
    return whole
