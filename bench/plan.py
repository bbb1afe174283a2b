"""All benchmarks in order, each in a process of its own."""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
import time

RUN = str(pathlib.Path(__file__).with_name("run.py"))

# Those that need a quiet machine most come first.
FULL = [
    "kernels",
    "step",
    "step --allocator tuned",
    "overhead",
    "backward",
    "host",
    "tensors",
    "gpt",
    "gpt --allocator tuned --sizes 10M",
    "accumulate",
    "transport --ranks 2",
    "step --ranks 2",
    "tensors --ranks 2",
    "layers --ranks 2",
    "gpt --ranks 2",
    "accumulate --ranks 2",
    "checkpoint",
    "nvme",
    "fits",
    "memory",
    "memory --ranks 2",
    "hybrid --ranks 2",
    "parallel --ranks 2",
    "layers",
    "transport --ranks 4",
    "tables",
]
# Every benchmark once, where it shows most.
QUICK = [
    "kernels",
    "step",
    "overhead",
    "backward",
    "host",
    "tensors",
    "transport --ranks 2",
    "layers --ranks 2",
    "gpt --ranks 2",
    "accumulate --ranks 2",
    "checkpoint",
    "nvme",
    "fits",
    "memory --ranks 2",
    "hybrid --ranks 2",
    "parallel --ranks 2",
    "tables",
]


def passed_on(args: argparse.Namespace) -> list[str]:
    words = [f"--{name}" for name in ("quick", "noisy") if getattr(args, name)]
    if args.rounds is not None:
        words += ["--rounds", str(args.rounds)]
    if args.folder is not None:
        words += ["--out", str(args.folder)]
    return words


def run_all(args: argparse.Namespace) -> str | None:
    """Which benchmarks failed or were refused, None if none; the others have their reports."""
    failed, start = [], time.monotonic()
    for line in QUICK if args.quick else FULL:
        print(f"== {line}", flush=True)
        began = time.monotonic()
        done = subprocess.run([sys.executable, RUN, *line.split(), *passed_on(args)], check=False)
        print(f"== {line}: {time.monotonic() - began:.0f} s", flush=True)
        if done.returncode != 0:
            failed.append(line)
    print(f"== {(time.monotonic() - start) / 60:.1f} minutes; index: {args.out / 'README.md'}", flush=True)
    return f"no report: {'; '.join(failed)}" if failed else None
