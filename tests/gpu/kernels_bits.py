"""Every form of every kernel on the device beside the same sources compiled for the host: the same bits. With sizes
that the project's tests do not reach: several turns of the grid, indices above 2^32."""

from __future__ import annotations

import ctypes as C
import itertools
from typing import Any

import torch
from common import DEVICE, SMALL, Results, no_differences, sync
from device_table import (
    BF16,
    DTYPES,
    F16,
    F32,
    FORMS,
    NAMES,
    RULES,
    Data,
    Key,
    Table,
    device_library,
    differing,
    host_library,
    load,
    random_data,
    stream,
    sums,
    update,
)

SIZES = [1, 255, 4097, 1 << 16] if SMALL else [1, 255, 4097, 1 << 20, (1 << 22) + 3]


def compared(mine: Data, theirs: Data, what: str) -> dict[str, int]:
    off = {f"{k}, {what}": differing(mine.tensors[k], theirs.tensors[k]) for k in mine.tensors}
    return {k: count for k, count in off.items() if count}


def form_of_update(device: Table, host: Table, rule: str, form: str) -> dict[str, Any]:
    off: dict[str, int] = {}
    for n, grad in itertools.product(SIZES, (F32, BF16, F16) if form == "fp32" else (F32, BF16)):
        mine = random_data(n, form, RULES[rule][2], grad, seed=n)
        theirs = mine.to(DEVICE)
        update(host, rule, mine)
        update(device, rule, theirs)
        sync()
        off |= compared(mine, theirs, f"n {n}, grad {NAMES[grad]}")
    return no_differences(off)


def elementwise(device: Table, host: Table, name: str) -> dict[str, Any]:
    off = {}
    key = Key(1, 2, (1 << 34) - 100)
    more = (C.byref(key),) if "stochastic" in name else ()
    for to, of, n, scale in itertools.product(DTYPES, DTYPES, SIZES, (1.0, 0.3)):
        g = torch.Generator().manual_seed(n)
        src, dst = torch.randn(n, generator=g).to(DTYPES[of]), torch.randn(n, generator=g).to(DTYPES[to])
        a, b, s = dst.clone(), dst.to(DEVICE, copy=True), src.to(DEVICE, copy=True)
        getattr(host, name)(a.data_ptr(), to, src.data_ptr(), of, scale, n, *more, None)
        getattr(device, name)(b.data_ptr(), to, s.data_ptr(), of, scale, n, *more, stream())
        sync()
        if count := differing(a, b):
            off[f"{NAMES[to]} of {NAMES[of]}, n {n}, scale {scale}"] = count
    return no_differences(off)


def split_and_join(device: Table, host: Table) -> dict[str, Any]:
    off = {}
    for n in SIZES:
        whole = torch.randn(n, generator=torch.Generator().manual_seed(n))
        found = []
        for table, where, on in ((host, torch.device("cpu"), 0), (device, DEVICE, stream())):
            src = whole.to(where, copy=True)
            weight = torch.empty(n, dtype=torch.bfloat16, device=where)
            residual, back = torch.empty(n, dtype=torch.int16, device=where), torch.empty(n, device=where)
            table.split(weight.data_ptr(), residual.data_ptr(), src.data_ptr(), n, on)
            table.join(back.data_ptr(), weight.data_ptr(), residual.data_ptr(), n, on)
            sync()
            found.append((weight, residual, back))
        counts = [differing(a, b) for a, b in zip(*found, strict=True)] + [differing(found[1][2], whole)]
        if any(counts):
            off[f"n {n}"] = counts
    return no_differences(off)


def squares(device: Table, host: Table) -> dict[str, Any]:
    off = {}
    for dtype, n in itertools.product(DTYPES, [*SIZES, 3 * 4096 + 5]):
        src = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(DTYPES[dtype])
        mine, theirs = sums(host, src, dtype), sums(device, src.to(DEVICE, copy=True), dtype).cpu()
        exact = (src.double() ** 2).sum()
        if differing(mine, theirs) or not torch.allclose(theirs.sum(), exact, rtol=1e-12):
            off[f"{NAMES[dtype]}, n {n}"] = [float(theirs.sum()), float(exact)]
    return no_differences(off)


def unaligned(device: Table, host: Table) -> dict[str, Any]:
    """Ranges that begin at any element, as parameters lie in a flat space."""
    off: dict[str, int] = {}
    for form, shift in itertools.product(FORMS, (1, 3, 7)):
        mine = random_data((1 << 14) + 8, form, 2, BF16, seed=shift)
        theirs = mine.to(DEVICE)
        update(host, "adamw", mine.part(shift, 1 << 14))
        update(device, "adamw", theirs.part(shift, 1 << 14))
        sync()
        off |= compared(mine, theirs, f"{form}, from element {shift}")
    return no_differences(off)


def segments(device: Table, host: Table) -> dict[str, Any]:
    """Many ranges of all sizes by one call."""
    off: dict[str, int] = {}
    cuts = [0, 1, 8, 21, 2048, 2049, 5000, *range(5003, 1 << 16, 797), 1 << 16]
    for form, rule in itertools.product(FORMS, ("adamw", "lion")):
        mine = random_data(1 << 16, form, RULES[rule][2], BF16, seed=7)
        theirs = mine.to(DEVICE)
        for table, data in ((host, mine), (device, theirs)):
            update(table, rule, *(data.part(a, b - a) for a, b in itertools.pairwise(cuts)))
        sync()
        off |= compared(mine, theirs, f"{rule}, {form}")
    return no_differences(off)


def beyond(device: Table, host: Table, n: int, form: str, rule: str) -> dict[str, Any]:
    """Compared with the host's run of parts: the ends, around 2^28 (the grid's turn), 2^31 and 2^32."""
    data = random_data(n, form, RULES[rule][2], BF16, seed=3, device=DEVICE)
    turns = [s - 2048 for s in (1 << 28, 1 << 31, 1 << 32) if 2048 < s < n - 4096]
    parts = {begin: data.part(begin, 4096).to(torch.device("cpu")) for begin in sorted({0, n - 4096, *turns})}
    update(device, rule, data)
    sync()
    off: dict[str, int] = {}
    for begin, part in parts.items():
        update(host, rule, part)
        off |= compared(part, data.part(begin, 4096), f"at {begin}")
    gb = sum(t.nbytes for t in data.tensors.values()) / 1e9
    return {"ok": not off, "differ": off, "elements": n, "gb": gb}


def huge_sum(device: Table) -> dict[str, Any]:
    n = (1 << 20) + 9 if SMALL else (1 << 32) + 4097
    found = float(sums(device, torch.ones(n, dtype=torch.bfloat16, device=DEVICE), BF16).sum())
    return {"ok": found == n, "sum": found, "n": n}


def main() -> None:
    r = Results("kernels_bits")
    device, host = load(device_library()), load(host_library())
    for rule, form in itertools.product(RULES, FORMS):
        if rule == "adamw" or not form.startswith("fp16"):
            r.case(f"update {rule}, {form}", form_of_update, device, host, rule, form)
    for name in ("scaled_add", "scaled_copy", "scaled_add_stochastic", "scaled_copy_stochastic"):
        r.case(name, elementwise, device, host, name)
    r.case("split and join", split_and_join, device, host)
    r.case("sums of squares", squares, device, host)
    r.case("ranges at any element", unaligned, device, host)
    r.case("many ranges at once", segments, device, host)
    large, huge = ((1 << 20) + 5, (1 << 20) + 7) if SMALL else ((1 << 28) + 4097, (1 << 32) + 12289)
    r.case("a grid of more than one turn", beyond, device, host, large, "fp32", "adamw")
    r.case("indices above 2^32", beyond, device, host, huge, "bf16, bf16 states", "lion", need=8)
    r.case("sum of 2^32 squares", huge_sum, device, need=5)
    r.end()


if __name__ == "__main__":
    main()
