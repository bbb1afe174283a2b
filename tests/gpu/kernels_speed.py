"""Time and bandwidth of each form of the kernels, as shares of what a copy on the same device reaches."""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable
from typing import Any

import torch
from common import DEVICE, SMALL, Results, median, times
from device_table import (
    BF16,
    BYTES,
    DTYPES,
    F32,
    FORMS,
    NAMES,
    RULES,
    Key,
    Table,
    device_library,
    load,
    random_data,
    stream,
    sums,
    update,
)

N = 1 << 16 if SMALL else 1 << 28
REPEATS = 3 if SMALL else 10


def rate(f: Callable[[], Any], moved: int, copy: float) -> dict[str, float]:
    ms = median(times(f, REPEATS))
    found = moved / ms / 1e6
    return {"ms": ms, "gb_s": found, "of_copy": found / copy, "ps_per_element": ms * 1e9 / N, "bytes": moved / N}


def copy_rate() -> float:
    a = torch.empty(4 * N, dtype=torch.uint8, device=DEVICE).random_()
    b = torch.empty_like(a)
    return 2 * a.numel() / median(times(lambda: b.copy_(a), REPEATS)) / 1e6


def of_update(table: Table, rule: str, form: str, grad: int, copy: float) -> dict[str, float]:
    data = random_data(N, form, RULES[rule][2], grad, device=DEVICE)
    return rate(lambda: update(table, rule, data), data.bytes(), copy)


def of_many(table: Table, count: int, copy: float) -> dict[str, float]:
    """The 8-byte mode's update of a model of so many parameters, in one call."""
    form, n = "bf16, bf16 states", N // count
    data = random_data(n * count, form, 2, BF16, device=DEVICE)
    parts = [data.part(n * i, n) for i in range(count)]
    return rate(lambda: update(table, "adamw", *parts), data.bytes(), copy)


def of_elementwise(table: Table, name: str, to: int, of: int, scale: float, copy: float) -> dict[str, float]:
    dst = torch.zeros(N, dtype=DTYPES[to], device=DEVICE)
    src = torch.ones(N, dtype=DTYPES[of], device=DEVICE)
    key = Key(1, 2, 3)
    more = (C.byref(key),) if "stochastic" in name else ()
    call = getattr(table, name)
    moved = N * (BYTES[of] + BYTES[to] * (2 if "add" in name else 1))
    return rate(lambda: call(dst.data_ptr(), to, src.data_ptr(), of, scale, N, *more, stream()), moved, copy)


def of_sum(table: Table, dtype: int, copy: float) -> dict[str, float]:
    src = torch.randn(N, device=DEVICE).to(DTYPES[dtype])
    torchs = median(times(lambda: torch.linalg.vector_norm(src), REPEATS))
    return rate(lambda: sums(table, src, dtype), N * BYTES[dtype], copy) | {"torch_norm_ms": torchs}


def of_torch(dtype: torch.dtype, copy: float) -> dict[str, float]:
    """torch's fused AdamW."""
    p = torch.nn.Parameter(torch.randn(N, device=DEVICE).to(dtype))
    p.grad = torch.randn(N, device=DEVICE).to(dtype)
    optimizer = torch.optim.AdamW([p], lr=1e-3, weight_decay=0.1, fused=True)
    return rate(optimizer.step, N * p.element_size() * 7, copy)


def main() -> None:
    r = Results("kernels_speed")
    table, copy = load(device_library()), copy_rate()
    r.note(copy_gb_s=copy, elements=N)
    updates = [("adamw", form, F32 if form == "fp32" else BF16) for form in FORMS]
    updates += [("lion", "bf16, bf16 states", BF16), ("sgd", "fp32", F32), ("momentum", "split", BF16)]
    for rule, form, grad in updates:
        r.case(f"update {rule}, {form}, grad {NAMES[grad]}", of_update, table, rule, form, grad, copy)
    for count in (9, 219):
        r.case(f"update adamw, bf16, bf16 states, {count} ranges", of_many, table, count, copy)
    for name, to, of, scale in (
        ("scaled_copy", BF16, F32, 0.5),
        ("scaled_copy", F32, BF16, 0.5),
        ("scaled_copy", BF16, BF16, 1.0),
        ("scaled_add", BF16, BF16, 0.5),
        ("scaled_add", F32, BF16, 0.5),
        ("scaled_add_stochastic", BF16, BF16, 0.5),
    ):
        what = f"{name} {NAMES[to]} of {NAMES[of]}"
        r.case(what, of_elementwise, table, name, to, of, scale, copy)
    for dtype in (F32, BF16):
        r.case(f"sum of squares {NAMES[dtype]}", of_sum, table, dtype, copy)
        r.case(f"torch's fused AdamW {NAMES[dtype]}", of_torch, DTYPES[dtype], copy)
    r.end()


if __name__ == "__main__":
    main()
