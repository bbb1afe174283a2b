"""Memory that processes of one host share: anonymous files (memfd), which the kernel frees with the last process that
has them open or mapped, however that process ends."""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_ALIGNMENT = 64  # bytes, of every tensor in a segment
_SECRET = 16  # bytes at its begin, which prove that it is this one: a descriptor's number is used again


@dataclass(frozen=True)
class Process:
    """A process, so that another one of its host can tell whether it still runs, and which of its threads made this."""

    host: str
    pid: int
    started: int  # ticks after the boot: a pid is used again
    thread: int

    @classmethod
    def this(cls) -> Process:
        # The namespace, too: processes of two containers cannot open each other's files.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        host = os.environ.get("TESSERA_HOST_ID") or f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
        started = _start_of(os.getpid())
        assert started is not None
        return cls(host, os.getpid(), started, threading.get_ident())

    def runs(self) -> bool:
        """Of a process of this host."""
        return _start_of(self.pid) == self.started


def _start_of(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # the name in parentheses may hold anything
    return None if state in "ZX" else int(fields[18])


@dataclass(frozen=True)
class SegmentPlace:
    """Where another process finds a segment."""

    pid: int
    fd: int
    bytes: int
    secret: str


class Segment:
    """Tensors in shared memory, written once. They are in other processes as long as those have them mapped.
    DistBackendError where there is no memory for them: touching a page that there is not ends a process."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        sizes = [t.numel() * t.element_size() for t in tensors]
        self.offsets: list[int] = []
        total = _ALIGNMENT  # of the secret
        for size in sizes:
            self.offsets.append(total)
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._fd = -1
        self._fd = _reserved(total)
        self.place = SegmentPlace(os.getpid(), self._fd, total, secrets.token_hex(_SECRET))
        memory = mmap.mmap(self._fd, total)
        memory[:_SECRET] = bytes.fromhex(self.place.secret)
        for tensor, offset in zip(tensors, self.offsets, strict=True):
            if tensor.numel() > 0:
                view_of(memory, tensor.dtype, tuple(tensor.shape), offset).copy_(tensor.detach())

    def close(self) -> None:
        """Nobody can open it any more; who has mapped it, keeps it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


def open_segment(place: SegmentPlace, owner: str) -> mmap.mmap:
    """Maps a segment of a process of this host. Writes stay private to this process."""
    path = f"/proc/{place.pid}/fd/{place.fd}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise dist.DistBackendError(
            f"[hybrid] cannot open the memory of {owner} ({path}: {error.strerror}); it has ended, or runs under "
            'another user: then use transport="group"'
        ) from None
    try:
        if os.fstat(fd).st_size == place.bytes:
            memory = mmap.mmap(fd, place.bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            if memory[:_SECRET].hex() == place.secret:
                return memory
    finally:
        os.close(fd)
    raise dist.DistBackendError(f"[hybrid] {path} of {owner} is not the memory that it has offered")


def _reserved(size: int) -> int:
    """A new anonymous file of that size, which has memory."""
    # An anonymous file has no limit of its own: asked for too much, the system would end processes instead of refusing.
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), size)
    try:
        if size > available:
            raise OSError(f"{available} B are available")
        fd = os.memfd_create("tessera", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, size)
        except OSError:
            os.close(fd)
            raise
        return fd
    except OSError as error:
        raise dist.DistBackendError(f"[hybrid] shared memory: {size} B are needed: {error}") from None


def view_of(memory: Any, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    """A tensor in the memory, which it keeps mapped."""
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
