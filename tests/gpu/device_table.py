"""A library of device kernels by its table alone (tessera/kernels/device_table.h), without an engine."""

from __future__ import annotations

import ctypes as C
from collections.abc import Iterator
from pathlib import Path

import torch
from common import ASKED, CUDA, DEVICE, DRY, WORK
from host_kernels import compile_for_the_host, up_to_date

VERSION, SUM_BLOCK = 4, 4096
F32, BF16, F16 = 0, 1, 2
DTYPES = {F32: torch.float32, BF16: torch.bfloat16, F16: torch.float16}
NAMES = {F32: "fp32", BF16: "bf16", F16: "fp16"}
BYTES = {F32: 4, BF16: 2, F16: 2}
GRAD_SCALE = -0.37


class Key(C.Structure):
    _fields_ = [("seed", C.c_uint64), ("step", C.c_uint64), ("first", C.c_uint64)]


class Range(C.Structure):
    _fields_ = [
        ("n", C.c_int64),
        ("master", C.c_void_p),
        ("residual", C.c_void_p),
        ("weight", C.c_void_p),
        ("weight_dtype", C.c_uint8),
        ("adopts", C.c_bool),
        ("grad", C.c_void_p),
        ("grad_dtype", C.c_uint8),
        ("state0", C.c_void_p),
        ("state1", C.c_void_p),
        ("state_dtype", C.c_uint8),
        ("rounding", C.c_uint8),
        ("random", Key),
    ]


def doubles(*names: str) -> list[tuple[str, type]]:
    return [(name, C.c_double) for name in names]


class Adam(C.Structure):
    _fields_ = [
        *doubles("lr", "beta1", "beta2", "eps", "weight_decay"),
        ("decoupled", C.c_bool),
        *doubles("bias1", "sqrt_bias2"),
    ]


class Sgd(C.Structure):
    _fields_ = [
        *doubles("lr", "momentum", "dampening", "weight_decay"),
        ("nesterov", C.c_bool),
        ("first_step", C.c_bool),
    ]


class Lion(C.Structure):
    _fields_ = doubles("lr", "beta1", "beta2", "weight_decay")


class Adagrad(C.Structure):
    _fields_ = doubles("clr", "eps", "weight_decay")


# A range with its rule and scale, by the rule's class.
SEGMENTS: dict[type[C.Structure], type[C.Structure]] = {
    rule: type(
        f"{rule.__name__}Segment",
        (C.Structure,),
        {
            "_fields_": [
                ("rule", rule),
                ("range", Range),
                ("grad_scale", C.c_float),
                ("run", C.c_int64),
                ("stride", C.c_int64),
            ]
        },
    )
    for rule in (Adam, Sgd, Lion, Adagrad)
}


class SumSegment(C.Structure):
    _fields_ = [("src", C.c_void_p), ("dtype", C.c_uint8), ("n", C.c_int64), ("sums", C.c_void_p)]


P, I64, V, F, U8 = C.POINTER, C.c_int64, C.c_void_p, C.c_float, C.c_uint8
SCALED = C.CFUNCTYPE(None, V, U8, V, U8, F, I64, V)
STOCHASTIC = C.CFUNCTYPE(None, V, U8, V, U8, F, I64, P(Key), V)


class Table(C.Structure):
    _fields_ = [
        ("version", C.c_int),
        ("why_unusable", V),
        ("is_captured", V),
        *((rule.__name__.lower(), C.CFUNCTYPE(None, P(segment), I64, V)) for rule, segment in SEGMENTS.items()),
        ("scaled_copy", SCALED),
        ("scaled_add", SCALED),
        ("scaled_copy_stochastic", STOCHASTIC),
        ("scaled_add_stochastic", STOCHASTIC),
        ("split", C.CFUNCTYPE(None, V, V, V, I64, V)),
        ("join", C.CFUNCTYPE(None, V, V, V, I64, V)),
        ("sum_of_squares", C.CFUNCTYPE(None, P(SumSegment), I64, V)),
    ]


# Name -> entry of the table, its rule, how many states it has.
RULES: dict[str, tuple[str, C.Structure, int]] = {
    "adamw": ("adam", Adam(1e-3, 0.9, 0.999, 1e-8, 0.1, True, 1 - 0.9, (1 - 0.999) ** 0.5), 2),
    "adam l2": ("adam", Adam(1e-3, 0.3, 0.95, 1e-6, 0.1, False, 1, 1), 2),
    "sgd": ("sgd", Sgd(0.1, 0, 0, 0.01, False, False), 0),
    "momentum": ("sgd", Sgd(0.1, 0.9, 0.1, 0.01, True, False), 1),
    "lion": ("lion", Lion(1e-4, 0.9, 0.99, 0.1), 1),
    "adagrad": ("adagrad", Adagrad(1e-2, 1e-10, 0.01), 1),
}
# Name -> has a master, a weight, a residual; dtypes of weight and states; rounding (docs/kernels.md).
FORMS = {
    "fp32": (1, 0, 0, F32, F32, 0),
    "fp32+bf16": (1, 1, 0, BF16, F32, 0),
    "fp32+fp16": (1, 1, 0, F16, F32, 0),
    "split": (0, 1, 1, BF16, F32, 0),
    "bf16, fp32 states": (0, 1, 0, BF16, F32, 1),
    "fp16": (0, 1, 0, F16, F32, 0),
    "split, bf16 states": (0, 1, 1, BF16, BF16, 1),
    "bf16, bf16 states": (0, 1, 0, BF16, BF16, 1),
    "bf16, bf16 states, nearest": (0, 1, 0, BF16, BF16, 0),
}


class Data:
    """Tensors of one form by their names in Range, random."""

    def __init__(self, form: str, tensors: dict[str, torch.Tensor], grad: int, first: int) -> None:
        self.form, self.tensors, self.grad, self.first = form, tensors, grad, first

    def to(self, device: torch.device) -> Data:
        return Data(self.form, {k: v.to(device, copy=True) for k, v in self.tensors.items()}, self.grad, self.first)

    def part(self, begin: int, n: int) -> Data:
        """Elements [begin, begin + n), sharing memory."""
        cut = {k: v[begin : begin + n] for k, v in self.tensors.items()}
        return Data(self.form, cut, self.grad, self.first + begin)

    def range(self) -> Range:
        *_, weight, state, rounding = FORMS[self.form]
        pointers = {name: t.data_ptr() for name, t in self.tensors.items()}
        n = self.tensors["grad"].numel()
        key = Key(5, 6, self.first)
        dtypes = {"weight_dtype": weight if "weight" in pointers else BF16, "grad_dtype": self.grad}
        return Range(n=n, state_dtype=state, rounding=rounding, random=key, **dtypes, **pointers)

    def bytes(self) -> int:
        """Read and written: the gradient is read, the copy of a master is written."""
        both = "master" in self.tensors
        return sum((1 if k == "grad" or (k == "weight" and both) else 2) * t.nbytes for k, t in self.tensors.items())


def random_data(n: int, form: str, states: int, grad: int, seed: int = 0, device: torch.device | None = None) -> Data:
    """Drawn on `device` (default: the CPU). The elements are numbered around 2^34."""
    where = device or torch.device("cpu")
    master, weight, residual, weight_dtype, state_dtype, _ = FORMS[form]
    g = torch.Generator(where).manual_seed(seed)

    def drawn(dtype: int, positive: bool = False) -> torch.Tensor:
        t = torch.empty(n, dtype=DTYPES[dtype], device=where)
        for begin in range(0, n, 1 << 26):
            part = torch.randn(min(1 << 26, n - begin), generator=g, device=where)
            t[begin : begin + part.numel()] = part.abs() if positive else part
        return t

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        if master:
            yield "master", drawn(F32)
        if weight:
            yield "weight", drawn(weight_dtype)
        if residual:
            yield "residual", torch.randint(-32768, 32767, (n,), dtype=torch.int16, generator=g, device=where)
        for number in range(states):
            yield f"state{number}", drawn(state_dtype, positive=True)
        yield "grad", drawn(grad)

    return Data(form, dict(tensors()), grad, (1 << 34) - n // 2)


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream if CUDA else 0


def update(table: Table, rule: str, *data: Data) -> None:
    """All of them by one call."""
    entry, struct, _ = RULES[rule]
    segment = SEGMENTS[type(struct)]
    segments = (segment * len(data))(*(segment(struct, one.range(), GRAD_SCALE, 0, 0) for one in data))
    getattr(table, entry)(segments, len(data), stream())


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements whose bits differ, NaNs apart."""
    a, b = a.cpu(), b.cpu()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    off = a.view(kind) != b.view(kind)
    if a.is_floating_point():
        off &= ~(a.isnan() & b.isnan())
    return int(off.sum())


def sums(table: Table, src: torch.Tensor, dtype: int) -> torch.Tensor:
    blocks = (src.numel() + SUM_BLOCK - 1) // SUM_BLOCK
    found = torch.zeros(blocks, dtype=torch.float64, device=src.device)
    segment = SumSegment(src.data_ptr(), dtype, src.numel(), found.data_ptr())
    table.sum_of_squares(C.byref(segment), 1, stream() if src.is_cuda else 0)
    return found


# ---- where the libraries are
def load(path: Path) -> Table:
    library = C.CDLL(str(path))
    library.tessera_device_table.restype = P(Table)
    table: Table = library.tessera_device_table().contents
    assert table.version == VERSION, f"{path} has version {table.version} of the table, {__file__} knows {VERSION}"
    return table


def host_library() -> Path:
    """The kernels as C++ for the host, behind the same table: out of the kit, or compiled here."""
    if (brought := Path(ASKED.kit or "/nowhere", "libtessera_cuda_host.so")).exists():
        return brought
    found = WORK / "libtessera_cuda_host.so"
    if not up_to_date(found):
        compile_for_the_host(found)
    return found


def device_library() -> Path:
    """Beside the core that is installed, as the core itself finds it. Dry: the host's."""
    if DRY:
        return host_library()
    import tessera

    name = f"libtessera_{DEVICE.type}.so"
    places = [Path(str(tessera.__file__)).parent, *(p for p in Path(str(tessera.__file__)).parents[1:3])]
    found = [p for place in places for p in (place / "lib" / name, place / name) if p.exists()]
    assert found, f"no {name} near {tessera.__file__}: Tessera was built without nvcc"
    return found[0]
