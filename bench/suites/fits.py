"""The largest GPT that trains in so much memory of a process: each engine, by a search over its number of layers, each
trial in a process of its own that is ended when it takes more."""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fits_trial import CONTEXT, ENGINES, options_of
from gpt import Gpt
from models import elements_of
from report import Result, table

PROGRAM = pathlib.Path(__file__).parents[1] / "fits_trial.py"
MIB = 1 << 20
LIMIT = {True: 1024 * MIB, False: 2048 * MIB}  # by quick mode
WIDTH = {True: 256, False: 1024}
MOST = {True: 8, False: 128}  # layers
SECONDS = 3600  # of a trial


@dataclass
class Trial:
    fits: bool
    peak: int = 0
    seconds: float = 0.0
    why: str = ""  # it failed, other than by its memory


def resident(process: int) -> int:
    try:
        lines = pathlib.Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def trial(engine: str, layers: int, width: int, limit: int, folder: str) -> Trial:
    """Freed memory goes back to the system at once, for all engines."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder) as own, tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, PROGRAM, engine, str(layers), str(width), own],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"},
        )
        peak = 0
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            if peak > limit or time.perf_counter() - start > SECONDS:
                process.kill()
                process.wait()
                why = "" if peak > limit else f"no end within {SECONDS} s"
                return Trial(False, peak, time.perf_counter() - start, why)
            time.sleep(0.01)
        output.seek(0)
        lines = output.read().splitlines()
    seconds = time.perf_counter() - start
    found = [line.split() for line in lines if line.startswith("fits_trial ")]
    if process.returncode != 0 or not found:
        return Trial(False, peak, seconds, lines[-1] if lines else f"status {process.returncode}")
    peak = int(found[0][2])
    return Trial(peak <= limit, peak, seconds)


def largest(run: Callable[[int], Trial], most: int) -> tuple[int, dict[int, Trial]]:
    """Layers, 0 where not even one fits; the trials by layers."""
    trials: dict[int, Trial] = {}

    def fits(layers: int) -> bool:
        trials[layers] = run(layers)
        return trials[layers].fits

    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, trials


def parameters(layers: int, width: int) -> int:
    with torch.device("meta"):
        return elements_of(Gpt(options_of(layers, width)))


def bench_fits(args: argparse.Namespace, setup: Any, free_port: Any) -> Result:
    limit, width, most = LIMIT[args.quick], WIDTH[args.quick], MOST[args.quick]
    rows: list[list[str]] = []
    data: dict[str, Any] = {}
    left_out: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tessera-bench-", dir=args.folder_of_checkpoints) as folder:
        for engine in args.peers:

            def run(layers: int, engine: str = engine) -> Trial:
                return trial(engine, layers, width, limit, folder)

            layers, trials = largest(run, most)
            failed = [t.why for t in trials.values() if t.why]
            if failed:
                left_out.append(f"{ENGINES[engine][0]}: {failed[0]}")
            best = trials.get(layers, Trial(False))
            number = parameters(layers, width) / 1e6 if layers else 0.0
            more = ">= " if layers == most else ""
            rows.append([ENGINES[engine][0], f"{more}{layers}", f"{more}{number:.0f}"])
            rows[-1] += [f"{best.peak / MIB:.0f}", f"{best.seconds:.0f}"]
            data[engine] = {n: vars(t) for n, t in sorted(trials.items())} | {"layers": layers, "parameters": number}
            print(f"[fits] {rows[-1]}", file=sys.stderr, flush=True)
    text = [
        f"GPTs of width {width} on one row of {CONTEXT} tokens, bf16 with fp32 masters (Tessera: 14 bytes, exact), "
        f"AdamW, one rank: the most layers, up to {most}, of which two steps take at most {limit / MIB:.0f} MiB of "
        "resident memory, libraries and construction included. Tessera updates within the backward. glibc gives back "
        "what is freed (MALLOC_MMAP_THRESHOLD_=1000000).",
        table(["engine", "layers", "M parameters", "peak, MiB", "seconds of the trial"], rows),
    ]
    if left_out:
        text.append(f"Trials that failed other than by their memory: {'; '.join(left_out)}.")
    return Result(text, {"fits": data}, how="One search of each engine.", headline=[" ".join(r[:3]) for r in rows[:1]])
