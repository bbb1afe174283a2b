"""torch.profiler around a few steps, and what its events say of waits, copies and kernels."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from common import CUDA, sync
from torch.profiler import ProfilerActivity, profile, record_function

Event = dict[str, Any]
# Calls after which the host has waited for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")


def profiled(f: Callable[[], Any], file: Path | None = None) -> list[Event]:
    """The events of a chrome trace of f(), which stays in `file`. The device has nothing to do before and after."""
    sync()
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if CUDA else [])
    with profile(activities=kinds) as p:
        f()
        with record_function("after"):
            sync()
    with tempfile.TemporaryDirectory() as scratch:
        there = file or Path(scratch, "trace.json")
        p.export_chrome_trace(str(there))
        found: list[Event] = json.loads(there.read_text())["traceEvents"]
    return found


def waits_within(events: list[Event], phases: Iterable[str]) -> dict[str, dict[str, int]]:
    """Waits of the host, on whatever thread, by the record_function() ranges that they lie in."""
    found: dict[str, dict[str, int]] = {}
    for phase in phases:
        ranges = [
            (e["ts"], e["ts"] + e["dur"])
            for e in events
            if e.get("name") == phase and e.get("cat") == "user_annotation"
        ]
        calls: dict[str, int] = defaultdict(int)
        for e in events:
            if e.get("name") in WAITS and any(begin <= e["ts"] < end for begin, end in ranges):
                calls[e["name"]] += 1
        found[phase] = dict(calls)
    return found


def merged(spans: Iterable[tuple[float, float]]) -> list[list[float]]:
    """Spans that touch, as one."""
    found: list[list[float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return found


def counted(events: Iterable[Event], name: Callable[[Event], str]) -> dict[str, list[float]]:
    """By name: calls and microseconds."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for e in events:
        entry = found[name(e)]
        entry[0] += 1
        entry[1] += e["dur"]
    return dict(found)


def copies_beside(events: list[Event], busy: list[list[float]]) -> dict[str, Any]:
    """Copies by kind: microseconds, the share of them while a kernel ran, GB/s."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for e in events:
        if e.get("cat") != "gpu_memcpy":
            continue
        begin, end = e["ts"], e["ts"] + e["dur"]
        entry = found[e["name"].split("(")[0].strip()]
        entry[0] += end - begin
        entry[1] += sum(max(0.0, min(end, y) - max(begin, x)) for x, y in busy)
        entry[2] += e["args"].get("bytes", 0)
    return {
        kind: {"us": us, "beside_kernels": beside / us if us else None, "gb_s": size / us / 1e3 if us else None}
        for kind, (us, beside, size) in found.items()
    }


def link_busy(events: list[Event]) -> dict[str, float]:
    """By direction, the share of the time from the device's first work to its last in which something is copied to or
    from the host."""
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy")]
    if not work:
        return {}
    whole = max(e["ts"] + e["dur"] for e in work) - min(e["ts"] for e in work)
    found = {}
    for way in ("HtoD", "DtoH"):
        copies = merged((e["ts"], e["ts"] + e["dur"]) for e in work if f" {way} " in e["name"])
        found[way] = sum(end - begin for begin, end in copies) / whole
    return found


def summary(events: list[Event]) -> dict[str, Any]:
    kernels = [e for e in events if e.get("cat") == "kernel"]
    busy = merged((e["ts"], e["ts"] + e["dur"]) for e in kernels)
    span = busy[-1][1] - busy[0][0] if busy else 0
    used = sum(end - begin for begin, end in busy)
    gaps = sorted((b[0] - a[1] for a, b in itertools.pairwise(busy)), reverse=True)
    runtime = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    slow = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaEventQuery", *WAITS)
    ours = [e for e in kernels if "tessera" in e["name"]]
    ranges = [e for e in events if e.get("name", "").startswith("tessera::") and "dur" in e]
    top = sorted(counted(ours, short_name).items(), key=lambda item: -item[1][1])[:12]
    return {
        "span_us": span,
        "kernels_us": used,
        "busy": used / span if span else None,
        "largest_gaps_us": gaps[:10],
        "copies": copies_beside(events, busy),
        "link_busy": link_busy(events),
        "waits": counted((e for e in runtime if e["name"] in slow), lambda e: str(e["name"])),
        "tessera kernels": dict(top),
        "ranges": counted((e for e in ranges if e.get("cat") != "kernel"), lambda e: str(e["name"].split()[0])),
        "streams": sorted({str(e["args"].get("stream")) for e in kernels}),
    }


def short_name(kernel: Event) -> str:
    return str(kernel["name"].split("tessera::kernels::cuda::")[-1][:110])
