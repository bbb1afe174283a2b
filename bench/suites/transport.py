"""Collectives of torch.distributed between ranks of one host: the back end "tessera" beside Gloo."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measure import median, ratio, summary, together
from report import Goal, Result, cell, table

import tessera
from suites.transport_limits import COPIES, KIB, MIB, copy_limit, crossing_speed, floor

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
CALLS: dict[str, Call] = {
    "all_reduce": lambda b, g: dist.all_reduce(b.whole, group=g),
    "reduce_scatter": lambda b, g: dist.reduce_scatter_tensor(b.part, b.whole, group=g),
    "all_gather": lambda b, g: dist.all_gather_into_tensor(b.other, b.part, group=g),
    "all_to_all": lambda b, g: dist.all_to_all_single(b.other, b.whole, group=g),
}


def results_of(name: str, group: Any, args: argparse.Namespace) -> list[torch.Tensor]:
    found = []
    for call in CALLS.values():
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


def timed(call: Call, buffers: Buffers, group: Any, calls: int, until_all: bool = False) -> float:
    together()
    start = time.perf_counter()
    for _ in range(calls):
        call(buffers, group)
    if until_all:
        together()
    return (time.perf_counter() - start) / calls


def bench_transport(args: argparse.Namespace) -> Result:
    tessera.distributed.register_backend()
    groups = {name: dist.new_group(backend=name) for name in args.peers}
    gate(groups, args)
    sizes = [s for s in SIZES if s <= MIB] if args.quick else SIZES
    crossing = crossing_speed(args.ranks, args.rank)
    times: dict[tuple[str, int], dict[str, list[float]]] = {}
    for size in sizes:
        buffers = Buffers(size, args.ranks, args.rank)
        calls = min(100, max(2, 64 * MIB // size))  # so that ranks that begin at different moments do not count
        for kind, call in CALLS.items():
            mine = times.setdefault((kind, size), {name: [] for name in groups})
            for number in range(1 + args.rounds):
                for name, group in groups.items():
                    buffers.whole.fill_(1.0)
                    seconds = timed(call, buffers, group, calls)
                    if number > 0:
                        mine[name].append(seconds)
                # Where ranks share cores, one that has a core for itself for a while says nothing. A meeting of the
                # ranks takes as long as many small copies.
                seconds = min(timed(one_copy(copy), buffers, None, calls, size >= MIB) for copy in COPIES)
                if number > 0:
                    mine.setdefault(COPY, []).append(seconds)
    return finish(args, times, max(crossing, crossing_speed(args.ranks, args.rank)))


def one_copy(copy: Callable[[torch.Tensor, torch.Tensor], object]) -> Call:
    return lambda b, _: copy(b.other, b.whole)


def size_text(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def class_of(size: int) -> str | None:
    return "small" if size <= SMALL else "large" if size >= LARGE else None


def entry_of(kind: str, size: int, ranks: int, mine: dict[str, list[float]], crossing: float) -> dict[str, Any]:
    entry: dict[str, Any] = {"ms": {name: summary(seconds) for name, seconds in mine.items()}}
    copy = median(mine[COPY])
    limit = copy_limit(kind, ranks, copy) if size >= LARGE else floor(kind, ranks, size, copy, crossing)
    entry["limit"] = limit * 1e3
    if all(name in mine for name in NAMES):
        entry["ratio"] = ratio(mine["gloo"], mine["tessera"])
    if "tessera" in mine:
        entry["of_limit"] = limit / median(mine["tessera"])
    if "gloo" in mine:
        entry["possible"] = median(mine["gloo"]) / limit
    return entry


def row_of(peers: list[str], kind: str, size: int, entry: dict[str, Any]) -> list[str]:
    digits = 2 if size >= SMALL else 3
    row = [kind, size_text(size)]
    row += [cell(entry["ms"][name], digits) if name in entry["ms"] else "-" for name in peers]
    row += [cell(entry["ratio"]) if "ratio" in entry else "-", f"{entry['limit']:.{digits}f}"]
    row.append(f"{entry['of_limit']:.0%}" if "of_limit" in entry else "-")
    return [*row, f"{entry['possible']:.1f}" if "possible" in entry else "-"]


def finish(args: argparse.Namespace, times: dict[tuple[str, int], dict[str, list[float]]], crossing: float) -> Result:
    rows, data, shares, short = [], {}, [], []
    ratios: dict[str, list[float]] = {"small": [], "large": []}
    for (kind, size), mine in times.items():
        entry = entry_of(kind, size, args.ranks, mine, crossing)
        rows.append(row_of(args.peers, kind, size, entry))
        data[f"{kind} {size_text(size)}"] = entry
        group = class_of(size)
        if group and "ratio" in entry:
            ratios[group].append(entry["ratio"]["median"])
        if group and entry.get("possible", WANTED[group]) < WANTED[group]:
            short.append(f"{kind} {size_text(size)} ({entry['possible']:.1f})")
        if "of_limit" in entry and size >= LARGE:
            shares.append(entry["of_limit"])
    header = ["call", "buffer", *(f"{NAMES.get(name, name)}, ms" for name in args.peers)]
    header += ["Gloo / Tessera", "limit, ms", "of the limit", "Gloo / limit"]
    text = [
        "Collectives of torch.distributed on fp32 tensors, called one after the other and waited for; the buffer is "
        "the large one of a call. Results are compared first.",
        "Limit: a rank copies at the speed of one copy of this buffer by torch or libc, whichever is faster, in turns "
        "with the calls. From 64 MiB on, where data comes from memory, it reads each input that it needs and writes "
        "each output once. Below that, where caches hold it, what goes to another rank is copied into shared memory "
        f"and out of it; what another has just written comes at {crossing / 1e9:.1f} GB/s, the speed of that between "
        "the cores.",
        table(header, rows),
    ]
    if short:
        text.append(f"At the limit itself the goal beside Gloo would be missed in: {', '.join(short)}.")
    headline = [
        f"Gloo's time over Tessera's, {where}: {min(ratios[key]):.1f} to {max(ratios[key]):.1f}"
        for key, where in RANGES.items()
        if ratios[key]
    ]
    found = {"crossing_bytes_per_second": crossing, "transport": data}
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
