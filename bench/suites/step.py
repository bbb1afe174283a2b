"""From the reduced gradient to the updated weight, in bf16."""

from __future__ import annotations

import argparse

import torch
from limits import step_bytes
from measure import Times, bandwidth, difference, gate, interleaved, median, ratio, summaries, summary
from models import ManyTensors
from report import Goal, Result, cell, table
from trainers import trainers

from suites.common import AUTOGRAD, base_of, close, own_specs, starts

TENSORS = 50
PEER_BYTES = step_bytes(True, 16)  # fp32 master beside the bf16 weight, fp32 moments
TEN = ", 10 bytes"
Steps = dict[str, list[float]]


def peer_of(name: str) -> str:
    return name.replace("Tessera", "DeepSpeed") if name.startswith("Tessera") else ""


def step_table(args: argparse.Namespace, steps: Steps, speed: float) -> str:
    """`speed`: bytes a second."""
    specs, rows = own_specs(args.peers), []
    for name, seconds in steps.items():
        moved = step_bytes(True, specs[name].states) if name in specs else PEER_BYTES
        if name.endswith(TEN):
            moved = step_bytes(True, 10)
        ns = median(seconds) * 1e9 / args.parameters
        share = f"{moved * args.parameters / speed / median(seconds):.0%}"
        row = [name, f"{cell(summary(seconds), 2)} ms", f"{ns:.2f}", str(moved), share]
        rows.append([*row, cell(ratio(steps[peer_of(name)], seconds), 2) if peer_of(name) in steps else "-"])
    return table(["step alone", "", "ns/param", "B/param", "of limit", "DeepSpeed of that kind / this"], rows)


def whole_table(times: dict[str, Times], elements: int) -> str:
    rows = []
    for name, t in times.items():
        row = [name, f"{cell(summary(t.whole), 2)} ms"]
        if AUTOGRAD in times and name != AUTOGRAD:
            part = difference(t.whole, times[AUTOGRAD].whole, 1e3)
            row += [f"{cell(part, 2)} ms", f"{part['median'] * 1e6 / elements:.2f}"]
        rows.append(row + ["-"] * (4 - len(row)))
    return table(["engine", "whole step", "engine's part of backward plus step", "ns/param"], rows)


def goals_of(args: argparse.Namespace, times: dict[str, Times], steps: Steps, speed: float) -> list[Goal]:
    """Goals of the local step: with several ranks the collectives are in it."""
    if args.ranks > 1:
        return []
    base, goals, specs = base_of(times), [], own_specs(args.peers)

    def part_of(name: str) -> float:
        return median(times[name].whole) - median(times[AUTOGRAD].whole)

    def over(peer: str, name: str, limit: float) -> None:
        if {peer, name} <= steps.keys():
            value = median(steps[peer]) / median(steps[name])
            goals.append(Goal(f"{name}: {peer}'s step() over its own", value, limit, True))

    tuned = args.allocator == "tuned"
    for name in ("Tessera 1", "Tessera 2"):
        over(peer_of(name), name, 1.7 if tuned else 3)
        if AUTOGRAD in times and name in times:
            goals.append(Goal(f"{name}: engine's part over that of {base}", part_of(name) / part_of(base), 1))
    if tuned:
        over("DeepSpeed 1", "Tessera 1" + TEN, 2.5)
    for name in (n for n in specs if n in steps and specs[n].stage in (1, 2)):
        roof = step_bytes(True, specs[name].states) * args.parameters / speed
        goals.append(Goal(f"{name}: part of the limit its step reaches", roof / median(steps[name]), 0.8, True))
    return goals


def bench_step(args: argparse.Namespace) -> Result:
    torch.manual_seed(0)
    elements = args.parameters
    entries = trainers(args.peers, lambda: ManyTensors(TENSORS, elements), True)
    batch = (torch.ones((), dtype=torch.bfloat16),)
    gate(entries, batch, 0.05)
    times = interleaved(entries, batch, args.rounds)
    close(entries)
    speed = bandwidth() * 1e9
    steps = {name: t.step for name, t in times.items() if name != AUTOGRAD}
    text = [
        f"{elements / 1e6:g} M parameters in {TENSORS} tensors, bf16. Step alone: engine.step(), and by hand the casts "
        "to and from fp32 masters, clip_grad_norm_ and fused AdamW. "
        + ("" if args.ranks == 1 else "With several ranks it holds the collectives that the engine has there. ")
        + "Limit: the bytes that norm and update must read and write for a parameter, at the probed bandwidth "
        + ("" if args.ranks == 1 else "on one rank; sharded states need less ")
        + "(the kernels' streams can be a little faster than the probe's). Tessera has the exact mode, 14 bytes of "
        "states, where no number is given; the others fp32 masters. DeepSpeed with 10 bytes rounds to nearest.",
        step_table(args, steps, speed),
        "Whole step: forward and backward of almost no arithmetic, then the step. The engine's part of backward plus "
        f"step is what the whole step takes beyond '{AUTOGRAD}'.",
        whole_table(times, elements),
        starts(times),
    ]
    data = {"step": summaries(times), "bytes_per_second": speed, "parameters": elements}
    return Result(text, data, goals_of(args, times, steps, speed), headline=headline_of(steps))


def headline_of(steps: Steps) -> list[str]:
    pairs = [(n, peer_of(n)) for n in ("Tessera 1", "Tessera 3") if {n, peer_of(n)} <= steps.keys()]
    found = [f"step() of {peer} over {own}: {median(steps[peer]) / median(steps[own]):.1f}" for own, peer in pairs]
    if {"Tessera 1" + TEN, "DeepSpeed 1"} <= steps.keys():
        found.append(f"over Tessera 1{TEN}: {median(steps['DeepSpeed 1']) / median(steps['Tessera 1' + TEN]):.1f}")
    return found
