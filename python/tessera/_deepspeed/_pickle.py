"""The pickle inside a file of torch.save, read without running it: by a machine of our own that knows the operations
torch.save writes and the names in _NAMES. Every other name is an IoError before anything of it is imported. Tensors
become TensorRef: where in the file their elements lie; objects of classes become Inert. Who needs the tensors alone
(`skip`) gets an Inert for objects of unknown names, too; nothing of them is imported either."""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch

from tessera._blobs import TRUST

_DEEPEST_KEY = 8


@dataclass
class Block:
    """A record of the archive: where its bytes are, and their CRC-32; 0 where torch was told to compute none."""

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
# As the first argument of collections.defaultdict only.
_ONLY_NAMED = {"builtins.int", "builtins.float", "__builtin__.int", "__builtin__.float"}


def _key(key: Any, depth: int = 0) -> Any:
    """Of a dict or set: plain, so that hashing it runs nothing and ends."""
    if isinstance(key, tuple) and depth < _DEEPEST_KEY:
        for item in key:
            _key(item, depth + 1)
    elif not (key is None or isinstance(key, (str, int, float, bytes, torch.dtype))):
        raise ValueError(f"a {type(key).__name__} as a key")
    return key


# ---------------------------------------------------------------- the machine

_MARK = object()


class Machine:
    """Runs the operations of a pickle that torch.save writes (protocol 2), and those of protocols 3 and 4."""

    def __init__(self, data: bytes, file: Archive, skip: bool = False) -> None:
        self.data, self.at, self.file, self.skip = data, 0, file, skip
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def take(self, count: int) -> bytes:
        begin, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise ValueError("it ends before its end")
        return self.data[begin : self.at]

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def to_mark(self) -> list[Any]:
        for depth in range(len(self.stack) - 1, -1, -1):
            if self.stack[depth] is _MARK:
                items = self.stack[depth + 1 :]
                del self.stack[depth:]
                return items
        raise ValueError("an operation without its beginning")

    def run(self) -> Any:
        while True:
            code = self.take(1)
            if code == pickle.STOP:
                (result,) = self.stack
                if result is _MARK:
                    raise ValueError("it has no value")
                return result
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise ValueError(f"operation {code!r}, which torch.save does not write")
            operation(self)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("an operation without its operands")
        return value

    def find(self, module: str, name: str) -> Any:
        found = _NAMES.get(f"{module}.{name}")
        if found is None and self.skip:
            return _Class(module, name)
        if found is None:
            self.file.fail(
                f"holds an object of '{module}.{name}', which is none of those that such files are known to hold: "
                f"nothing was run. {TRUST}"
            )
        return found

    def call(self) -> None:
        args, function = self.pop(), self.pop()
        if self.skip and isinstance(function, Inert):  # what an unknown name has given
            function = _Class(function.module, function.name)
        if not isinstance(function, (_Function, _Class)) or not isinstance(args, tuple):
            raise ValueError("a call of what is no function")
        if isinstance(function, _Function) and function.call in (int, float):
            raise ValueError("a call of a type")
        self.stack.append(function(*args))

    def build(self) -> None:
        state, value = self.pop(), self.stack[-1]
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

    def set_items(self, pairs: Sequence[Any]) -> None:
        target = self.stack[-1]
        if self.skip and isinstance(target, Inert):
            return
        if not isinstance(target, dict) or len(pairs) % 2:
            raise ValueError("items of what is no dict")
        for index in range(0, len(pairs), 2):
            if self.skip and isinstance(pairs[index], Inert):
                continue
            target[_key(pairs[index])] = pairs[index + 1]

    def append(self, items: Sequence[Any]) -> None:
        target = self.stack[-1]
        if self.skip and isinstance(target, Inert):
            return
        if not isinstance(target, list):
            raise ValueError("items of what is no list")
        target.extend(items)

    def add(self, items: Sequence[Any]) -> None:
        target = self.stack[-1]
        if self.skip and isinstance(target, Inert):
            return
        if not isinstance(target, set):
            raise ValueError("items of what is no set")
        target.update(_key(item) for item in items)

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def tuple_of(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(items)))


def _push(read: Callable[[Machine], Any]) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(read(m))


def _skip(count: int) -> Callable[[Machine], None]:
    def skip(machine: Machine) -> None:
        machine.take(count)

    return skip


def _text(size: int) -> Callable[[Machine], str]:
    return lambda m: m.take(m.number(size)).decode("utf-8", "surrogatepass")


def _bytes(size: int) -> Callable[[Machine], bytes]:
    return lambda m: m.take(m.number(size))


def _signed(size: int) -> Callable[[Machine], int]:
    return lambda m: int.from_bytes(m.take(size), "little", signed=True)


_OPERATIONS: dict[bytes, Callable[[Machine], None]] = {
    pickle.PROTO: _skip(1),
    pickle.FRAME: _skip(8),
    pickle.MARK: _push(lambda m: _MARK),
    pickle.NONE: _push(lambda m: None),
    pickle.NEWTRUE: _push(lambda m: True),
    pickle.NEWFALSE: _push(lambda m: False),
    pickle.BININT: _push(_signed(4)),
    pickle.BININT1: _push(lambda m: m.number(1)),
    pickle.BININT2: _push(lambda m: m.number(2)),
    pickle.LONG1: _push(lambda m: int.from_bytes(m.take(m.number(1)), "little", signed=True)),
    pickle.BINFLOAT: _push(lambda m: struct.unpack(">d", m.take(8))[0]),
    pickle.BINUNICODE: _push(_text(4)),
    pickle.SHORT_BINUNICODE: _push(_text(1)),
    pickle.BINUNICODE8: _push(_text(8)),
    pickle.BINBYTES: _push(_bytes(4)),
    pickle.SHORT_BINBYTES: _push(_bytes(1)),
    pickle.BINBYTES8: _push(_bytes(8)),
    pickle.EMPTY_DICT: _push(lambda m: {}),
    pickle.EMPTY_LIST: _push(lambda m: []),
    pickle.EMPTY_TUPLE: _push(lambda m: ()),
    pickle.EMPTY_SET: _push(lambda m: set()),
    pickle.TUPLE: _push(lambda m: tuple(m.to_mark())),
    pickle.TUPLE1: lambda m: m.tuple_of(1),
    pickle.TUPLE2: lambda m: m.tuple_of(2),
    pickle.TUPLE3: lambda m: m.tuple_of(3),
    pickle.LIST: _push(lambda m: m.to_mark()),
    pickle.FROZENSET: _push(lambda m: frozenset(_key(item) for item in m.to_mark())),
    pickle.APPEND: lambda m: m.append([m.pop()]),
    pickle.APPENDS: lambda m: m.append(m.to_mark()),
    pickle.ADDITEMS: lambda m: m.add(m.to_mark()),
    pickle.SETITEM: lambda m: m.set_items([m.pop(), m.pop()][::-1]),
    pickle.SETITEMS: lambda m: m.set_items(m.to_mark()),
    pickle.BINPUT: lambda m: m.put(m.number(1)),
    pickle.LONG_BINPUT: lambda m: m.put(m.number(4)),
    pickle.MEMOIZE: lambda m: m.put(len(m.memo)),
    pickle.BINGET: _push(lambda m: m.memo[m.number(1)]),
    pickle.LONG_BINGET: _push(lambda m: m.memo[m.number(4)]),
    pickle.GLOBAL: _push(lambda m: m.find(m.line(), m.line())),
    pickle.STACK_GLOBAL: _push(lambda m: m.find(*[str(m.pop()), str(m.pop())][::-1])),
    pickle.REDUCE: Machine.call,
    pickle.NEWOBJ: Machine.call,
    pickle.BUILD: Machine.build,
    pickle.BINPERSID: _push(lambda m: m.file.storage(m.pop())),
}


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
