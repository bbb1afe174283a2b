"""From the reduced gradient to the updated weight, in bf16 with fp32 master weights."""

from __future__ import annotations

import argparse

import torch
from contenders import contenders
from measure import bandwidth, difference, gate, interleaved, median, ratio, summaries, summary
from models import ManyTensors
from report import Goal, Result, cell, table

from suites.common import AUTOGRAD, base_of, close

BYTES = 2 + 14 + 14  # norm; update of fp32 master and moments, bf16 gradient and weight
TENSORS = 50


def peer_of(name: str) -> str:
    return name.replace("Tessera", "DeepSpeed") if name.startswith("Tessera") else ""


def bench_step(args: argparse.Namespace) -> Result:
    torch.manual_seed(0)
    elements = args.parameters
    entries = contenders(args.peers, lambda: ManyTensors(TENSORS, elements), True)
    batch = (torch.ones((), dtype=torch.bfloat16),)
    gate(entries, batch, 0.05)
    times = interleaved(entries, batch, args.rounds)
    close(entries)
    roof = BYTES * elements / bandwidth() / 1e9  # seconds
    base = base_of(times)
    steps = {name: t.step for name, t in times.items() if name != AUTOGRAD}
    rows, goals = [], []
    for name, seconds in steps.items():
        ns, limit = median(seconds) * 1e9 / elements, f"{100 * roof / median(seconds):.0f}%"
        row = [name, f"{cell(summary(seconds), 2)} ms", f"{ns:.2f}", limit]
        rows.append([*row, cell(ratio(steps[peer_of(name)], seconds), 2) if peer_of(name) in steps else "-"])
    header = ["step alone", "", "ns/param", "of limit", "DeepSpeed of that stage / this"]
    text = [
        f"{elements / 1e6:g} M parameters in {TENSORS} tensors. Step alone: engine.step(), and by hand the casts to "
        "and from fp32 masters, clip_grad_norm_ and fused AdamW. "
        + ("" if args.ranks == 1 else "With several ranks it holds the collectives that the engine has there. ")
        + f"Limit: {BYTES} B a parameter at the probed bandwidth, {roof * 1e3:.2f} ms"
        + ("." if args.ranks == 1 else " on one rank; sharded states need less."),
        table(header, rows),
    ]
    part_rows = []
    for name, t in times.items():
        row = [name, f"{cell(summary(t.whole), 2)} ms"]
        if AUTOGRAD in times and name != AUTOGRAD:
            part = difference(t.whole, times[AUTOGRAD].whole, 1e3)
            row += [f"{cell(part, 2)} ms", f"{part['median'] * 1e6 / elements:.2f}"]
        part_rows.append(row + ["-"] * (4 - len(row)))
    text += [
        "Whole step: forward and backward of almost no arithmetic, then the step. The engine's part of backward plus "
        f"step is what the whole step takes beyond '{AUTOGRAD}'.",
        table(["engine", "whole step", "engine's part of backward plus step", "ns/param"], part_rows),
    ]

    def part_of(name: str) -> float:
        return median(times[name].whole) - median(times[AUTOGRAD].whole)

    # Goals of the local step: with several ranks the collectives are in it.
    for name in (n for n in ("Tessera 1", "Tessera 2") if n in times and args.ranks == 1):
        peer = peer_of(name)
        if peer in steps:
            goals.append(
                Goal(f"{name}: {peer}'s step() over its own", median(steps[peer]) / median(steps[name]), 3, True)
            )
        if AUTOGRAD in times:
            goals.append(Goal(f"{name}: engine's part over that of {base}", part_of(name) / part_of(base), 1))
        goals.append(Goal(f"{name}: part of the limit its step reaches", roof / median(steps[name]), 0.8, True))
    return Result(text, {"step": summaries(times), "limit_ms": roof * 1e3, "parameters": elements}, goals)
