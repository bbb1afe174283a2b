"""Files of torch.save: zip archives whose records are stored as they are, data.pkl (see _pickle.py) and one for every
storage. They are read in place: nothing but the pickle, until a tensor is asked for."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from tessera._blobs import number_of_numpy
from tessera._deepspeed._pickle import (
    Block,
    Inert,
    Named,
    Refusing,
    Storage,
    StorageType,
    TensorRef,
    Trusting,
    numpy_code,
)
from tessera.errors import IoError

PICKLE_LIMIT = 1 << 30  # bytes of data.pkl
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")


def _array(state: Any) -> Any:
    """Of NumPy's; what it pickles is version, shape, dtype, whether in Fortran's order, bytes."""
    import numpy  # no program that saves one is without it

    _, shape, dtype, fortran, data = state
    return numpy.frombuffer(data, numpy_code(dtype)).reshape(shape, order="F" if fortran else "C").copy()


def _stream(state: Any) -> io.BytesIO:
    stream = io.BytesIO(state[0])
    stream.seek(state[1])
    return stream


_MADE: dict[tuple[str, str], Callable[[Any], Any]] = {("numpy", "ndarray"): _array, ("_io", "BytesIO"): _stream}


class PtFile:
    """A file of torch.save: `value` is what was saved, `blocks` the records of tensors in order of their place. Objects
    of unknown classes are an IoError, or imported (`trusted`), or skipped (`skip`)."""

    def __init__(self, path: str, trusted: bool = False, skip: bool = False) -> None:
        self.path = path
        self.blocks: list[Block] = []
        try:
            with open(path, "rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                pickled = self._archive(file)
        except OSError as error:
            if isinstance(error, IoError):
                raise
            raise IoError(f"[checkpoint] '{path}' cannot be read: {error.strerror or error}") from None
        self.value: Any = self._unpickled(pickled, trusted, skip)

    def fail(self, what: str) -> NoReturn:
        raise IoError(f"[checkpoint] '{self.path}' {what}")

    def _archive(self, file: io.BufferedReader) -> bytes:
        """Finds the records; the bytes of data.pkl."""
        try:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
                pickles = [entry for entry in entries if entry.filename.split("/")[1:] == ["data.pkl"]]
                if len(pickles) != 1:
                    self.fail("is no file of torch.save: it has no data.pkl")
                root = pickles[0].filename.removesuffix("data.pkl")
                self._records = {
                    entry.filename.removeprefix(root + "data/"): self._block(file, entry)
                    for entry in entries
                    if entry.filename.startswith(root + "data/")
                }
                self.blocks = sorted(self._records.values(), key=lambda block: (block.begin, block.end))
                if any(a.end > b.begin for a, b in zip(self.blocks, self.blocks[1:], strict=False)):
                    self.fail("is damaged: two records overlap")
                for entry in entries:
                    if entry.filename == root + "byteorder" and self._contents(file, entry) != b"little":
                        self.fail("was written by a big-endian machine")
                return self._contents(file, pickles[0])
        except IoError:
            raise
        except Exception as error:  # of any kind that zipfile has for damaged archives
            self.fail(f"is damaged, or was not written by torch.save as a zip archive: {error}")

    def _block(self, file: io.BufferedReader, entry: zipfile.ZipInfo) -> Block:
        file.seek(entry.header_offset)
        magic, *_, names, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        begin = entry.header_offset + _LOCAL_HEADER.size + names + extra
        end = begin + entry.file_size
        if magic != b"PK\x03\x04" or entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            self.fail(f"has a record '{entry.filename}' that is not stored as it is")
        if entry.compress_size != entry.file_size or end > self.size:
            self.fail(f"is damaged: record '{entry.filename}' is beyond the file")
        return Block(begin, end, entry.CRC)

    def _contents(self, file: io.BufferedReader, entry: zipfile.ZipInfo) -> bytes:
        block = self._block(file, entry)
        if block.end - block.begin > PICKLE_LIMIT:
            self.fail(f"is no checkpoint: '{entry.filename}' has {block.end - block.begin} bytes")
        file.seek(block.begin)
        data = file.read(block.end - block.begin)
        if block.checksum and zlib.crc32(data) != block.checksum:
            self.fail(f"is damaged: the checksum of '{entry.filename}' differs")
        return data

    def _unpickled(self, pickled: bytes, trusted: bool, skip: bool) -> Any:
        try:
            stream = io.BytesIO(pickled)
            return (Trusting(stream, self) if trusted else Refusing(stream, self, skip)).load()
        except IoError:
            raise
        except RecursionError:
            self.fail("is damaged: its pickle is nested too deep")
        except Exception as error:
            self.fail(f"is damaged: its pickle cannot be read ({type(error).__name__}: {error})")

    def storage(self, pid: Any) -> Storage:
        """The record that a persistent id names."""
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
            self.fail("is damaged: its pickle refers to something that is no storage")
        kind, key, _, numel = pid[1:]
        dtype = kind.dtype if isinstance(kind, StorageType) else None
        if dtype is None or not isinstance(numel, int) or numel < 0 or str(key) not in self._records:
            self.fail(f"is damaged: there is no storage {key!r:.40}")
        block = self._records[str(key)]
        if numel * dtype.itemsize > block.end - block.begin:
            self.fail(f"is damaged: storage {key!r:.40} has fewer bytes than its tensors need")
        return Storage(block, dtype, numel)

    def read(self, ref: TensorRef) -> torch.Tensor:
        """The tensor in memory, its storage checked."""
        block = ref.storage.block
        if ref.numel() > ref.storage.numel:
            self.fail(f"has a tensor of shape {ref.shape} that repeats the elements of a smaller one")
        with open(self.path, "rb") as file:
            file.seek(block.begin)
            data = file.read(block.end - block.begin)
        if block.checksum and zlib.crc32(data) != block.checksum:
            self.fail(f"is damaged: the checksum of bytes {block.begin} to {block.end} differs")
        if ref.numel() == 0:
            return torch.empty(ref.shape, dtype=ref.dtype)
        flat = torch.frombuffer(bytearray(data), dtype=ref.dtype, count=ref.storage.numel)
        return flat.as_strided(ref.shape, ref.stride, ref.offset).clone()

    def plain(self, value: Any, seen: dict[int, Any] | None = None) -> Any:
        """The value with its tensors in memory, numbers of NumPy's as Python's, and records of objects as dicts. What
        is shared stays so."""
        seen = {} if seen is None else seen
        if id(value) in seen:
            return seen[id(value)]
        result = number_of_numpy(value)
        if isinstance(value, Named):
            self.fail("has the name of a function or a class in the place of a value")
        if isinstance(value, TensorRef):
            result = self.read(value)
        elif isinstance(value, Inert) and (value.module, value.name) in _MADE and value.raw is not None:
            result = _MADE[value.module, value.name](value.raw)
        elif isinstance(value, Inert):
            result = {"__class__": f"{value.module}.{value.name}", **self.plain(value.state, seen)}
        elif type(value) in (dict, OrderedDict):
            result = type(value)((key, self.plain(item, seen)) for key, item in value.items())
        elif type(value) in (list, tuple):
            result = type(value)(self.plain(item, seen) for item in value)
        seen[id(value)] = result
        return result
