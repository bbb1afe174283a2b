"""Collectives of torch.distributed between ranks of one host: the back end "tessera" beside Gloo."""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measure import median, ratio, summary, together
from report import Goal, Result, cell, table

import tessera

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
LARGE = 64 * MIB  # from here on data comes from memory
SMALL = 4 * MIB
NAMES = {"gloo": "Gloo", "tessera": "Tessera"}
COPY = "copy"  # takes its turn as an engine does
RANGES = {"small": "4 KiB to 4 MiB", "large": "64 and 256 MiB"}
WANTED = {"small": 10, "large": 3}  # times Gloo's speed


class Buffers:
    """Of `size` bytes in all; a rank's part is one of as many as there are ranks."""

    def __init__(self, size: int, ranks: int, rank: int) -> None:
        n = size // 4 // ranks * ranks
        self.whole = torch.arange(n, dtype=torch.float32).remainder_(13).add_(rank)
        self.other = torch.empty(n)
        self.part = torch.full((n // ranks,), float(rank))


Call = Callable[[Buffers, Any], object]
# What is called, and the seconds that copying alone would take, for N ranks and S bytes when each rank copies C bytes a
# second: the machine then reads and writes 2 N C bytes a second.
CALLS: dict[str, tuple[Call, Callable[[int, int, float], float]]] = {
    "all_reduce": (
        lambda b, g: dist.all_reduce(b.whole, group=g),
        lambda n, s, c: (n + 1) * s / (2 * n * c) + s / c,
    ),
    "reduce_scatter": (
        lambda b, g: dist.reduce_scatter_tensor(b.part, b.whole, group=g),
        lambda n, s, c: (n + 1) * s / (2 * n * c),
    ),
    "all_gather": (lambda b, g: dist.all_gather_into_tensor(b.other, b.part, group=g), lambda n, s, c: s / c),
    "all_to_all": (lambda b, g: dist.all_to_all_single(b.other, b.whole, group=g), lambda n, s, c: s / c),
}


# What writes all of the buffer and reads as much, whatever moves it, where buffers belong to their ranks.
NEEDS_A_COPY = ("all_reduce", "all_gather", "all_to_all")


def torch_copy(b: Buffers, _: Any = None) -> None:
    b.other.copy_(b.whole)


def libc_copy(b: Buffers, _: Any = None) -> None:
    ctypes.memmove(b.other.data_ptr(), b.whole.data_ptr(), b.whole.nbytes)


def copy_speed() -> float:
    """Bytes a second that a rank copies while all do, best of 5. The clock stops when all are through: where ranks
    share cores, one that has a core for itself for a while says nothing."""
    x, y = torch.ones(16 * MIB), torch.ones(16 * MIB)
    copies = 8  # a meeting of the ranks takes little beside them
    best = 0.0
    for _ in range(5):
        together()
        start = time.perf_counter()
        for _ in range(copies):
            y.copy_(x)
        together()
        best = max(best, copies * y.nbytes / (time.perf_counter() - start))
    return best


def results_of(name: str, group: Any, args: argparse.Namespace) -> list[torch.Tensor]:
    found = []
    for call, _ in CALLS.values():
        buffers = Buffers(64 * KIB, args.ranks, args.rank)
        buffers.other.zero_()
        call(buffers, group)
        found += [buffers.whole, buffers.other, buffers.part]
    return found


def gate(groups: dict[str, Any], args: argparse.Namespace) -> None:
    """Whole numbers, so every order of summation has one result."""
    found = {name: results_of(name, group, args) for name, group in groups.items()}
    first = next(iter(found))
    for name, mine in found.items():
        # What reduce_scatter leaves of its input is its own affair.
        pairs = [pair for i, pair in enumerate(zip(mine, found[first], strict=True)) if i != 3]
        if not all(torch.equal(a, b) for a, b in pairs):
            raise RuntimeError(f"{name} and {first} have other results")


def timed(call: Call, buffers: Buffers, group: Any, calls: int) -> float:
    together()
    start = time.perf_counter()
    for _ in range(calls):
        call(buffers, group)
    return (time.perf_counter() - start) / calls


def bench_transport(args: argparse.Namespace) -> Result:
    tessera.distributed.register_backend()
    groups = {name: dist.new_group(backend=name) for name in args.peers}
    gate(groups, args)
    sizes = [s for s in SIZES if s <= MIB] if args.quick else SIZES
    speed = copy_speed()
    times: dict[tuple[str, int], dict[str, list[float]]] = {}
    for size in sizes:
        buffers = Buffers(size, args.ranks, args.rank)
        calls = min(100, max(2, 64 * MIB // size))  # so that ranks that begin at different moments do not count
        for kind, (call, _) in CALLS.items():
            mine = times.setdefault((kind, size), {name: [] for name in groups})
            for number in range(1 + args.rounds):
                for name, group in groups.items():
                    buffers.whole.fill_(1.0)
                    seconds = timed(call, buffers, group, calls)
                    if number > 0:
                        mine[name].append(seconds)
                if kind in NEEDS_A_COPY:
                    seconds = min(timed(copy, buffers, None, calls) for copy in (torch_copy, libc_copy))
                    if number > 0:
                        mine.setdefault(COPY, []).append(seconds)
    return finish(args, times, min(speed, copy_speed()))


def size_text(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def class_of(size: int) -> str | None:
    return "small" if size <= SMALL else "large" if size >= LARGE else None


def entry_of(mine: dict[str, list[float]], limit: float) -> dict[str, Any]:
    entry: dict[str, Any] = {"ms": {name: summary(seconds) for name, seconds in mine.items()}}
    if all(name in mine for name in NAMES):
        entry["ratio"] = ratio(mine["gloo"], mine["tessera"])
    if "tessera" in mine:
        entry["of_limit"] = limit / median(mine["tessera"])
    if "gloo" in mine and COPY in mine:
        entry["copy_ratio"] = ratio(mine["gloo"], mine[COPY])
    return entry


def row_of(peers: list[str], kind: str, size: int, entry: dict[str, Any]) -> list[str]:
    def shown(name: str) -> str:
        return cell(entry["ms"][name], 2 if size >= SMALL else 3) if name in entry["ms"] else "-"

    row = [kind, size_text(size), *map(shown, peers)]
    row.append(cell(entry["ratio"]) if "ratio" in entry else "-")
    row.append(f"{entry['of_limit']:.0%}" if "of_limit" in entry and size >= LARGE else "-")
    return [*row, shown(COPY), cell(entry["copy_ratio"]) if "copy_ratio" in entry else "-"]


def finish(args: argparse.Namespace, times: dict[tuple[str, int], dict[str, list[float]]], speed: float) -> Result:
    rows, data, shares, short = [], {}, [], []
    ratios: dict[str, list[float]] = {"small": [], "large": []}
    for (kind, size), mine in times.items():
        entry = entry_of(mine, CALLS[kind][1](args.ranks, size, speed))
        rows.append(row_of(args.peers, kind, size, entry))
        data[f"{kind} {size_text(size)}"] = entry
        group = class_of(size)
        if group and "ratio" in entry:
            ratios[group].append(entry["ratio"]["median"])
        if group and "copy_ratio" in entry and entry["copy_ratio"]["median"] < WANTED[group]:
            short.append(f"{kind} {size_text(size)}")
        if "of_limit" in entry and size >= LARGE:
            shares.append(entry["of_limit"])
    header = ["call", "buffer", *(f"{NAMES.get(name, name)}, ms" for name in args.peers)]
    header += ["Gloo / Tessera", "of the copy limit", "one copy, ms", "Gloo / one copy"]
    text = [
        "Collectives of torch.distributed on fp32 tensors, called one after the other and waited for; the buffer is "
        "the large one of a call. Results are compared first.",
        f"Copy limit: what reading and writing the data takes at {speed / 1e9:.1f} GB/s, the copying speed of a rank "
        "while all copy; each input read once by whoever needs it, each output written once. One copy: each rank "
        "copies the buffer once, by torch or libc, whichever is faster, in turns with the calls and from the same "
        "caches. A call whose ranks have buffers of their own writes all of it and reads as much.",
        table(header, rows),
    ]
    if short:
        text.append(f"One copy alone is short of the goal beside Gloo in: {', '.join(short)}.")
    headline = [
        f"Gloo's time over Tessera's, {where}: {min(ratios[key]):.1f} to {max(ratios[key]):.1f}"
        for key, where in RANGES.items()
        if ratios[key]
    ]
    found = {"copy_bytes_per_second": speed, "transport": data}
    return Result(text, found, goals_of(ratios, shares), headline=headline)


def goals_of(ratios: dict[str, list[float]], shares: list[float]) -> list[Goal]:
    goals = [
        Goal(f"Gloo over Tessera, {where}, least of all rows", min(ratios[key]), WANTED[key], True)
        for key, where in RANGES.items()
        if ratios[key]
    ]
    if shares:
        goals.append(Goal("share of the copy limit, 64 and 256 MiB, least of all rows", min(shares), 0.4, True))
    return goals
