"""What a disk can do with the files of a checkpoint: large aligned blocks, several on their way, nothing else."""

from __future__ import annotations

import mmap
import os
import pathlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

BLOCK, DEPTH = 4 << 20, 8


def files_in(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def size_of(folder: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in files_in(folder))


def _blocks(size: int, work: Callable[[mmap.mmap, int, int], object]) -> None:
    """work(memory, offset, bytes) for each block; DEPTH at a time, each with memory of its own."""
    memories = [mmap.mmap(-1, BLOCK) for _ in range(DEPTH)]

    def lane(number: int) -> None:
        for offset in range(number * BLOCK, size, DEPTH * BLOCK):
            work(memories[number], offset, min(BLOCK, size - offset))

    with ThreadPoolExecutor(DEPTH) as pool:
        list(pool.map(lane, range(DEPTH)))


def write_seconds(path: pathlib.Path, size: int) -> float:
    """One new file of whole blocks, past the page cache where the file system lets us, until it is on the disk."""
    size = (size + BLOCK - 1) // BLOCK * BLOCK
    start = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError:
        direct = os.dup(fd)
    os.posix_fallocate(fd, 0, size)
    _blocks(size, lambda memory, offset, count: os.pwrite(direct, memory[:count] if count < BLOCK else memory, offset))
    os.fsync(fd)
    os.close(direct)
    os.close(fd)
    return time.perf_counter() - start


def both_seconds(path: pathlib.Path, size: int) -> float:
    """Every block of a file read and written once, past the page cache where the file system lets us. Makes the file
    where there is none."""
    size = (size + BLOCK - 1) // BLOCK * BLOCK
    if not path.exists():
        write_seconds(path, size)
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        fd = os.open(path, os.O_RDWR)

    def through(memory: mmap.mmap, offset: int, count: int) -> None:
        os.preadv(fd, [memory], offset)
        os.pwrite(fd, memory, offset)

    start = time.perf_counter()
    _blocks(size, through)
    seconds = time.perf_counter() - start
    os.close(fd)
    return seconds


def read_seconds(folder: pathlib.Path) -> float:
    """All files of a folder once, into memory that is used again."""
    start = time.perf_counter()
    for path in files_in(folder):
        fd = os.open(path, os.O_RDONLY)
        _blocks(path.stat().st_size, lambda memory, offset, count, fd=fd: os.preadv(fd, [memory], offset))
        os.close(fd)
    return time.perf_counter() - start


def sync_seconds(folder: pathlib.Path) -> float:
    """Until files that were written are on the disk."""
    start = time.perf_counter()
    for path in files_in(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    return time.perf_counter() - start


def forget(folder: pathlib.Path) -> None:
    """The page cache has nothing of the files any more."""
    for path in files_in(folder):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
