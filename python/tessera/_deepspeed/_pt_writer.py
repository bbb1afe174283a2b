"""Files that torch.load opens, written without having their tensors in memory: data.pkl first, then every storage in
pieces as they come. Objects of classes that are not here are written by their names."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tessera.errors import ConfigError

_ALIGNMENT = 64  # of storages, as torch.save has it
_ROOT = "archive"
_STORAGE_NAMES = {
    torch.float64: "DoubleStorage", torch.float32: "FloatStorage", torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage", torch.int64: "LongStorage", torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage", torch.uint8: "ByteStorage", torch.bool: "BoolStorage",
    torch.complex64: "ComplexFloatStorage", torch.complex128: "ComplexDoubleStorage",
}  # fmt: skip


@dataclass(eq=False)
class Streamed:
    """A contiguous tensor whose elements come in order, in 1-D tensors of its dtype."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[torch.Tensor]]


@dataclass(eq=False)
class Made:
    """An object of `module`.`name` with these attributes."""

    module: str
    name: str
    state: dict[str, Any]


@dataclass(frozen=True)
class _Global:
    module: str
    name: str

    def __call__(self) -> None:  # a pickler asks whether it can be called
        raise TypeError


@dataclass(eq=False)
class _Storage:
    tensor: Streamed
    key: str

    @property
    def numel(self) -> int:
        return torch.Size(self.tensor.shape).numel()


class _Pickler(pickle._Pickler):  # the one in Python: that in C writes names of importable objects only
    write: Callable[[bytes], None]
    memo: dict[int, Any]
    memoize: Callable[[Any], None]

    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=2)
        self.storages: list[_Storage] = []
        self._kept: list[Any] = []  # ids are remembered

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        name = _STORAGE_NAMES.get(obj.tensor.dtype)
        if name is None:
            raise ConfigError(
                f"[checkpoint] there is a tensor of dtype {obj.tensor.dtype}, which DeepSpeed's files are not written "
                'with here; save with "checkpoint": {"format": "tessera"}'
            )
        return "storage", _Global("torch", name), obj.key, "cpu", obj.numel

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, _Global):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, Made) and id(obj) not in self.memo:
            self.save(_Global(obj.module, obj.name))
            self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
            self.memoize(obj)
            self.save(obj.state)
            self.write(pickle.BUILD)
        else:
            super().save(obj, save_persistent_id)  # type: ignore[misc]

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            whole = obj.detach().cpu().contiguous()
            streamed = Streamed(whole.dtype, tuple(whole.shape), lambda: iter([whole.view(-1)]))
            self._kept.append(streamed)
            return self._reduced(streamed)
        return self._reduced(obj) if isinstance(obj, Streamed) else NotImplemented

    def _reduced(self, tensor: Streamed) -> tuple[Any, ...]:
        storage = _Storage(tensor, str(len(self.storages)))
        self.storages.append(storage)
        strides = torch.empty(tensor.shape, device="meta").stride()
        return _Global("torch._utils", "_rebuild_tensor_v2"), (storage, 0, tuple(tensor.shape), strides, False, {})


def write_pt(path: str, value: Any) -> None:
    """Through to the disk."""
    out = io.BytesIO()
    pickler = _Pickler(out)
    pickler.dump(value)
    with open(path, "wb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            _record(archive, "data.pkl", iter([out.getvalue()]))
            _record(archive, "byteorder", iter([b"little"]))
            for storage in pickler.storages:
                _record(archive, f"data/{storage.key}", _bytes_of(storage))
            _record(archive, "version", iter([b"3\n"]))
        file.flush()
        os.fsync(file.fileno())


def _record(archive: zipfile.ZipFile, name: str, chunks: Iterator[Any]) -> None:
    info = zipfile.ZipInfo(f"{_ROOT}/{name}", (1980, 1, 1, 0, 0, 0))
    assert archive.fp is not None
    # Local header, name, the archive's own 20 bytes for large files, then a field that is skipped ("FB").
    begin = archive.fp.tell() + 30 + len(info.filename) + 20 + 4
    padding = -begin % _ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(info, "w", force_zip64=True) as record:
        for chunk in chunks:
            record.write(chunk)


def _bytes_of(storage: _Storage) -> Iterator[Any]:
    left = storage.numel
    for chunk in storage.tensor.chunks() if left else ():
        assert chunk.dtype == storage.tensor.dtype, (chunk.dtype, storage.tensor.dtype)
        left -= chunk.numel()
        yield chunk.contiguous().view(torch.uint8).numpy().data
    assert left == 0, f"{left} elements of {storage.tensor.shape} did not come"
