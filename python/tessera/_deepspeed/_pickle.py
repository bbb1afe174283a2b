"""The pickle inside a file of torch.save, read without running it: by an unpickler that knows the operations torch.save
writes and the names in _NAMES. Every other name is an IoError before anything of it is imported. Tensors become
TensorRef: where in the file their elements lie; objects of classes become Inert. Who needs the tensors alone (`skip`)
gets an Inert for objects of unknown names, too; nothing of them is imported either."""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch

from tessera._blobs import TRUST

_LARGEST_KEY = 1000  # parts of a tuple that is a key, with those of tuples in it


@dataclass
class Block:
    """A record of the archive: where its bytes are, and their CRC-32; 0 where torch was asked to compute none."""

    begin: int
    end: int
    checksum: int


@dataclass
class Storage:
    block: Block
    dtype: torch.dtype
    numel: int


@dataclass
class TensorRef:
    storage: Storage
    offset: int  # of the first element, in elements of the storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    @property
    def begin(self) -> int:
        """Of its first element in the file."""
        return self.storage.block.begin + self.offset * self.dtype.itemsize

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_contiguous(self) -> bool:
        return self.numel() == 0 or dense_order(self) == list(range(len(self.shape)))


@dataclass
class Inert:
    """An object of a class that is not imported."""

    module: str
    name: str
    args: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)
    raw: Any = None  # a state that is no dict


def dense_order(ref: TensorRef) -> list[int] | None:
    """The dims from the slowest to the fastest in memory; None where elements do not lie one after the other."""
    dims = range(len(ref.shape))
    order = sorted(dims, key=lambda dim: (-ref.stride[dim] if ref.shape[dim] > 1 else 0, dim))
    # Dims of size 1 are anywhere; where the others keep their order, all do.
    if [d for d in order if ref.shape[d] > 1] == [d for d in dims if ref.shape[d] > 1]:
        order = list(dims)
    expected = 1
    for dim in reversed(order):
        if ref.shape[dim] != 1 and ref.stride[dim] != expected:
            return None
        expected *= ref.shape[dim]
    return order


class Archive(Protocol):
    """What a pickle refers to."""

    def fail(self, what: str) -> NoReturn: ...
    def storage(self, pid: Any) -> Storage: ...


# ---------------------------------------------------------------- names that files may hold


class Named:
    """What a name stands for; no value of its own."""


@dataclass(frozen=True)
class StorageType(Named):
    dtype: torch.dtype


@dataclass(frozen=True)
class _Class(Named):
    """Of objects that become Inert."""

    module: str
    name: str

    def __call__(self, *args: Any) -> Inert:
        return Inert(self.module, self.name, args)


@dataclass(frozen=True)
class _Function(Named):
    call: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> TensorRef:
    numbers = (offset, *shape, *stride)
    if not isinstance(storage, Storage) or not all(type(n) is int and 0 <= n < 1 << 56 for n in numbers):
        raise ValueError("a tensor of something that is no storage, or of sizes that cannot be")
    if len(shape) != len(stride) or len(shape) > 64:
        raise ValueError("a tensor with other numbers of sizes and strides")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if 0 not in shape and last >= storage.numel:
        raise ValueError(f"a tensor of shape {tuple(shape)} is beyond its storage of {storage.numel} elements")
    if 0 in shape and offset > storage.numel:
        raise ValueError("a tensor is beyond its storage")
    return TensorRef(storage, offset, tuple(shape), tuple(stride))


def _rebuild_parameter(data: Any, *_: Any) -> TensorRef:
    if not isinstance(data, TensorRef):
        raise ValueError("a parameter of something that is no tensor")
    return data


def _rebuild_from_type(function: Any, kind: Any, args: Any, _: Any) -> TensorRef:
    """Of tensors with attributes of their own, which are left out."""
    if not isinstance(function, _Function) or function.call not in (_rebuild_tensor, _rebuild_parameter):
        raise ValueError("a tensor that is not made as tensors are")
    result: TensorRef = function.call(*args)
    return result


def numpy_code(dtype: Any) -> str:
    """Of a dtype of NumPy's that is plain numbers, as "f8"."""
    known = isinstance(dtype, Inert) and (dtype.module, dtype.name) == ("numpy", "dtype") and len(dtype.args) > 0
    code = dtype.args[0] if known else None
    if code not in _NUMPY_FORMATS or (dtype.raw is not None and dtype.raw[1] not in ("<", "|", "=")):
        raise ValueError(f"numbers of NumPy's of a dtype {code!r:.40} that is not known")
    return str(code)


def _numpy_scalar(dtype: Any, data: Any) -> Any:
    return struct.unpack("<" + _NUMPY_FORMATS[numpy_code(dtype)], data)[0]


def _numpy_array(*_: Any) -> Inert:
    return Inert("numpy", "ndarray")


def _encode(text: Any, coding: Any) -> bytes:
    if coding not in ("latin1", "latin-1"):
        raise ValueError("bytes in another coding")
    return str(text).encode("latin1")


def _ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    return OrderedDict((_key(key), value) for key, value in pairs)


def _default_dict(*_: Any) -> dict[Any, Any]:
    return {}


_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_NUMPY_FORMATS = {
    "f8": "d", "f4": "f", "f2": "e", "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H",
    "u4": "I", "u8": "Q",
}  # fmt: skip
_REAL = ("numpy", "_io")  # packages whose objects a trusted file has as they are
_LOSS_SCALER = "deepspeed.runtime.fp16.loss_scaler"
_CLASSES = {
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
    _LOSS_SCALER: ("LossScaler", "DynamicLossScaler", "LossScalerBase"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.checkpoint.universal_checkpoint": ("SubparamShape",),
    "deepspeed.runtime.lr_schedules": ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"),
    "numpy": ("ndarray", "dtype"),
    "_io": ("BytesIO",),
    "torch.optim.lr_scheduler": ("LambdaLR", "StepLR", "CosineAnnealingLR", "LinearLR", "ConstantLR", "SequentialLR"),
}
_NAMES: dict[str, Any] = {
    "collections.OrderedDict": _Function(_ordered),
    "collections.defaultdict": _Function(_default_dict),
    "torch._utils._rebuild_tensor_v2": _Function(_rebuild_tensor),
    "torch._utils._rebuild_parameter": _Function(_rebuild_parameter),
    "torch._utils._rebuild_parameter_with_state": _Function(_rebuild_parameter),
    "torch._tensor._rebuild_from_type_v2": _Function(_rebuild_from_type),
    "torch.Tensor": _Class("torch", "Tensor"),
    "torch.nn.parameter.Parameter": _Class("torch.nn.parameter", "Parameter"),
    "torch.Size": _Function(lambda sizes: tuple(sizes)),
    "torch.device": _Class("torch", "device"),
    "_codecs.encode": _Function(_encode),
    **{f"numpy.{core}.multiarray.scalar": _Function(_numpy_scalar) for core in ("_core", "core")},
    **{f"numpy.{core}.multiarray._reconstruct": _Function(_numpy_array) for core in ("_core", "core")},
    **{f"torch.{name}": StorageType(dtype) for name, dtype in _STORAGES.items()},
    **{f"torch.{name}": getattr(torch, name) for name in _DTYPES},
    **{f"{module}.{name}": _Class(module, name) for module, names in _CLASSES.items() for name in names},
    **{
        f"{module}.{name}": _Function(call)
        for module in ("builtins", "__builtin__")
        for name, call in (
            ("set", lambda items=(): {_key(item) for item in items}),
            ("frozenset", lambda items=(): frozenset(_key(item) for item in items)),
            ("dict", _default_dict),
            ("list", lambda items=(): list(items)),
            ("bytes", lambda: b""),
            ("int", int),
            ("float", float),
        )
    },
}


def _key(key: Any) -> Any:
    """Of a dict or set: plain, so that hashing it runs nothing and ends."""
    pending, count = [key], 0
    while pending:
        part, count = pending.pop(), count + 1
        if count > _LARGEST_KEY:
            raise ValueError(f"a key of more than {_LARGEST_KEY} parts")
        if isinstance(part, tuple):
            pending.extend(part)
        elif not (part is None or isinstance(part, (str, int, float, bytes, torch.dtype))):
            raise ValueError(f"a {type(part).__name__} as a key")
    return key


# ---------------------------------------------------------------- the unpicklers


class _Operations(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> NoReturn:
        raise ValueError(f"operation {bytes([code])!r}, which torch.save does not write")


# Of protocol 2, which torch.save writes, and of 3 and 4, as pickle carries them out. What calls, sets a state or hashes
# is Refusing's own.
_PLAIN = (
    *(pickle.PROTO, pickle.FRAME, pickle.MARK, pickle.STOP, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8),
    *(pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.BINBYTES8),
    *(pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE, pickle.EMPTY_SET),
    *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.LIST),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BINPERSID),
)


class Refusing(pickle._Unpickler):
    """Runs nothing that the file says.

    Note [The unpickler in Python]
      pickle.Unpickler, which is C, sizes its memo by a number of the file (10 bytes make it fill 34 GB) and hashes keys
      of dicts itself, where a tuple that is nested deep enough ends the process. pickle's unpickler in Python has a
      dict as its memo and a table of its operations, which joblib and pandas extend too."""

    stack: list[Any]
    metastack: list[list[Any]]
    pop_mark: Callable[[], list[Any]]
    dispatch = _Operations({code[0]: pickle._Unpickler.dispatch[code[0]] for code in _PLAIN})

    def __init__(self, stream: io.BytesIO, file: Archive, skip: bool = False) -> None:
        super().__init__(stream)
        self._file, self._skip = file, skip

    def load(self) -> Any:
        try:
            value = super().load()
        except EOFError:
            raise ValueError("it ends before its end") from None
        if self.stack or self.metastack:
            raise ValueError("it has more than one value")
        return value

    def find_class(self, module: str, name: str) -> Any:
        found = _NAMES.get(f"{module}.{name}")
        if found is None and self._skip:
            return _Class(module, name)
        if found is None:
            self._file.fail(
                f"holds an object of '{module}.{name}', which is none of those that such files are known to hold: "
                f"nothing was run. {TRUST}"
            )
        return found

    def persistent_load(self, pid: Any) -> Storage:
        return self._file.storage(pid)

    def _target(self, kind: type) -> Any:
        """What the items before are put into; None for an object that is skipped."""
        target = self.stack[-1]
        if self._skip and isinstance(target, Inert):
            return None
        if not isinstance(target, kind):
            raise ValueError(f"items of what is no {kind.__name__}")
        return target

    def _call(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        if self._skip and isinstance(function, Inert):  # what an unknown name has given
            function = _Class(function.module, function.name)
        if not isinstance(function, (_Function, _Class)) or not isinstance(args, tuple):
            raise ValueError("a call of what is no function")
        if isinstance(function, _Function) and function.call in (int, float):
            raise ValueError("a call of a type")
        self.stack.append(function(*args))

    def _build(self) -> None:
        state, value = self.stack.pop(), self.stack[-1]
        if isinstance(value, OrderedDict):
            return  # _metadata of a module's state dict
        if not isinstance(value, Inert):
            raise ValueError(f"a state of a {type(value).__name__}")
        parts = state if isinstance(state, tuple) else (state,)
        if not all(part is None or isinstance(part, dict) for part in parts):
            value.raw = state
            return
        for part in parts:
            if part is not None:
                value.state.update({str(_key(key)): item for key, item in part.items()})

    def _set_items(self, pairs: list[Any]) -> None:
        target = self._target(dict)
        if len(pairs) % 2:
            raise ValueError("a key without its value")
        for key, item in zip(pairs[::2], pairs[1::2], strict=True) if target is not None else ():
            if not (self._skip and isinstance(key, Inert)):
                target[_key(key)] = item

    def _append(self, items: list[Any]) -> None:
        target = self._target(list)
        if target is not None:
            target.extend(items)

    def _add(self) -> None:
        items, target = self.pop_mark(), self._target(set)
        if target is not None:
            target.update(_key(item) for item in items)

    def _frozen_set(self) -> None:
        items = self.pop_mark()
        self.stack.append(frozenset(_key(item) for item in items))

    dispatch.update(
        {
            pickle.REDUCE[0]: _call,
            pickle.NEWOBJ[0]: _call,
            pickle.BUILD[0]: _build,
            pickle.SETITEM[0]: lambda self: self._set_items([self.stack.pop(), self.stack.pop()][::-1]),
            pickle.SETITEMS[0]: lambda self: self._set_items(self.pop_mark()),
            pickle.APPEND[0]: lambda self: self._append([self.stack.pop()]),
            pickle.APPENDS[0]: lambda self: self._append(self.pop_mark()),
            pickle.ADDITEMS[0]: _add,
            pickle.FROZENSET[0]: _frozen_set,
        }
    )


class Trusting(pickle.Unpickler):
    """Imports what it does not know. Runs what the file says."""

    def __init__(self, stream: io.BytesIO, file: Archive) -> None:
        super().__init__(stream)
        self._file = file

    def find_class(self, module: str, name: str) -> Any:
        known = None if module.split(".")[0] in _REAL else _NAMES.get(f"{module}.{name}")
        if isinstance(known, _Class):
            of = known

            def make(cls: type[Inert], *args: Any) -> Inert:
                made = object.__new__(cls)
                made.module, made.name, made.args, made.state = of.module, of.name, args, {}
                return made

            def set_state(self: Inert, state: Any) -> None:
                self.state.update(state or {})

            return type(name, (Inert,), {"__new__": make, "__init__": lambda *_: None, "__setstate__": set_state})
        return known if known is not None else super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Storage:
        return self._file.storage(pid)
