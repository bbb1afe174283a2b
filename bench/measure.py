"""Measuring: interleaved rounds, medians with spread, a memory-bandwidth probe, one JSON file a run."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

REPORTS = pathlib.Path(__file__).parent / "reports"


def bandwidth() -> float:
    """GB/s of y = a*x + y over 64 MiB arrays (read 2, write 1), best of 5: the roof of an optimizer pass."""
    n = 16 << 20
    x, y = torch.ones(n), torch.ones(n)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        y.add_(x, alpha=0.5)
        best = max(best, 12 * n / (time.perf_counter() - start) / 1e9)
    return best


def interleaved(runs: dict[str, Callable[[], object]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of each run in each round: A B C A B C ..., after `warmup` rounds that are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(warmup + rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if number >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def summary(seconds: list[float], scale: float = 1e3) -> dict[str, float]:
    return {
        "median": statistics.median(seconds) * scale,
        "min": min(seconds) * scale,
        "max": max(seconds) * scale,
    }


def peak_memory() -> int:
    """Largest resident size of this process so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def machine() -> dict[str, Any]:
    cpu = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            cpu = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), cpu)
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None:
        versions["deepspeed"] = deepspeed.__version__
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": versions,
        "revision": revision.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def write_report(name: str, title: str, command: str, tables: list[str], data: dict[str, Any]) -> pathlib.Path:
    """reports/<name>.json with everything, reports/<name>.md with the tables made from it."""
    REPORTS.mkdir(exist_ok=True)
    where = machine()
    (REPORTS / f"{name}.json").write_text(json.dumps({"machine": where, "command": command, **data}, indent=1) + "\n")
    versions = ", ".join(f"{key} {value}" for key, value in where["versions"].items())
    head = (
        f"# {title}\n\n`{command}` on {where['date']}, revision {where['revision']}. {where['cpu']}, "
        f"{where['cores']} cores, {where['threads']} thread(s) a rank; {versions}. Medians of interleaved rounds "
        f"(min-max). Bandwidth probe (a*x+y): {data['probe'][0]:.1f} GB/s before, {data['probe'][1]:.1f} after.\n"
    )
    path = REPORTS / f"{name}.md"
    path.write_text(head + "\n" + "\n\n".join(tables) + "\n")
    return path


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def cell(value: dict[str, float], digits: int = 1) -> str:
    return f"{value['median']:.{digits}f} ({value['min']:.{digits}f}-{value['max']:.{digits}f})"
