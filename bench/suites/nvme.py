"""Optimizer states on a disk: a step beside what the disk needs for its bytes and what the update needs in memory."""

from __future__ import annotations

import argparse
import pathlib
import tempfile
import time
from collections import defaultdict
from typing import Any

import torch
from disk import both_seconds
from measure import median, ratio, summary, together
from report import Goal, Result, cell, table
from torch import nn

import tessera
from suites.nvme_peers import OWN, PEERS, measure_peers, text_of

NVME = PEERS["deepspeed:3"][0]
LIMIT = 1 / 0.9  # times the longer of disk and update
PART = 1 << 22  # elements of a parameter
MODES = {"fp32": 16, "bf16, exact": 14, "bf16, 10 bytes": 10, "bf16, 8 bytes": 8}
Seconds = dict[str, dict[str, list[float]]]  # by mode and what was timed


def parts_of(elements: int) -> int:
    return max(1, elements // PART)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(PART))

    def forward(self) -> torch.Tensor:
        return self.weight.sum().float()


class Parameters(nn.Module):
    """Nothing but parameters: forward and backward take next to no time."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(parts_of(elements)))

    def forward(self) -> torch.Tensor:
        return torch.stack([part() for part in self.parts]).sum()


def engine_of(elements: int, state_bytes: int, nvme: str | None) -> tessera.Engine:
    zero: dict[str, Any] = {"stage": 1}
    if nvme:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": nvme}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": state_bytes < 16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        "tessera": {"state_bytes": state_bytes},
    }
    return tessera.initialize(model=Parameters(elements), config=config)[0]


def step_seconds(engine: Any) -> float:
    engine.backward(engine())
    together()
    start = time.perf_counter()
    engine.step()
    return time.perf_counter() - start


def check(engines: list[tessera.Engine]) -> None:
    """The same bits, or there is no number."""
    for engine in engines:
        step_seconds(engine)
    one, *others = (engine.module.parts[0].weight for engine in engines)
    if not all(torch.equal(one, other) for other in others):
        raise RuntimeError("states on a disk train to other weights than states in memory")


def measure(args: argparse.Namespace, folder: pathlib.Path) -> tuple[Seconds, dict[str, int]]:
    seconds: Seconds = defaultdict(lambda: defaultdict(list))
    sizes: dict[str, int] = {}
    for mode, state_bytes in MODES.items():
        here, there = (engine_of(args.parameters, state_bytes, nvme) for nvme in (None, str(folder)))
        check([here, there])
        sizes[mode] = there.core.memory().disk
        probe = folder / f"probe-{args.rank}"
        both_seconds(probe, sizes[mode])  # the first time it makes the file
        for _ in range(args.rounds):
            seconds[mode]["step"].append(step_seconds(there))
            seconds[mode]["update"].append(step_seconds(here))
            together()
            seconds[mode]["disk"].append(both_seconds(probe, sizes[mode]))
        probe.unlink()
        here.destroy()
        there.destroy()
    return seconds, sizes


def rows_of(seconds: Seconds, sizes: dict[str, int]) -> list[list[str]]:
    rows = []
    for mode, times in seconds.items():
        limit = [max(pair) for pair in zip(times["disk"], times["update"], strict=True)]
        rows.append([mode, f"{sizes[mode] / 1e6:.0f}"])
        rows[-1] += [f"{cell(summary(times[what]), 0)} ms" for what in ("step", "disk", "update")]
        rows[-1] += [f"{2 * sizes[mode] / median(times['step']) / 1e9:.2f}", cell(ratio(times["step"], limit), 2)]
    return rows


HEADER = ["states", "MB on the disk", "step", "disk alone", "step in memory"]
HEADER += ["GB/s read and written", "x limit"]


def bench_nvme(args: argparse.Namespace) -> Result:
    text = [
        f"{parts_of(args.parameters) * PART / 1e6:.0f} M parameters, stage 1, AdamW, `offload_optimizer` nvme; a step "
        "is norm, update and refresh. 'disk alone': a file of as many bytes is read and written once, in aligned "
        "blocks of 4 MiB, 8 on their way, past the page cache. 'step in memory': the same engine without offload. The "
        "limit of a round is the longer of the two."
    ]
    goals: list[Goal] = []
    headline: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tessera-bench-", dir=args.folder_of_checkpoints) as folder:
        seconds, sizes = measure(args, pathlib.Path(folder))

        def own(state_bytes: int, nvme: str | None) -> tessera.Engine:
            return engine_of(args.parameters, state_bytes, nvme)

        peers, missing = measure_peers(
            args, pathlib.Path(folder), own, lambda: Parameters(args.parameters), step_seconds, PART
        )
    text.append(table(HEADER, rows_of(seconds, sizes)))
    text += text_of(peers, missing)
    for mode, times in seconds.items():
        limit = [max(pair) for pair in zip(times["disk"], times["update"], strict=True)]
        share = median(times["step"]) / median(limit)
        goals.append(Goal(f"{mode}: step, x the longer of disk and update", share, LIMIT))
        headline.append(f"{mode}: {2 * sizes[mode] / median(times['step']) / 1e9:.2f} GB/s")
    data = {
        mode: {what: summary(values) for what, values in times.items()} | {"bytes": sizes[mode]}
        for mode, times in seconds.items()
    }
    for mode, times in peers.items():
        goals += [
            Goal(f"{mode}: {name}, x our step on the disk", median(values) / median(times[OWN]), 1.5, at_least=True)
            for name, values in times.items()
            if name == NVME
        ]
    beside = {mode: {name: summary(values) for name, values in times.items()} for mode, times in peers.items()}
    return Result(text, {"nvme": data, "beside": beside}, goals, headline=headline)
