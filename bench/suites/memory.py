"""Bytes a parameter, each engine in processes of its own."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import memory
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from contenders import available, build
from measure import same_losses
from models import ManyLayers
from report import Goal, Result, table

STEPS = 5
LAYERS = 60
BATCH = (torch.ones((), dtype=torch.bfloat16),)
# Freed memory goes back to the system at once, so that resident memory is what is really held. glibc's default keeps
# what was freed below its own, moving threshold.
EXACT, DEFAULT = {"MALLOC_MMAP_THRESHOLD_": "65536"}, {}
RESIDENT, LATER, FIRST = 0, 1, 2


def train(name: str, elements: int) -> tuple[Any, list[float], int]:
    """A few steps of a fresh model; the peak of its construction and first step too."""
    torch.manual_seed(0)
    memory.reset_peak()
    entry = build(name, ManyLayers(LAYERS, elements, per_block=1), True)
    losses = [entry.train(*BATCH)]
    early = memory.peak()
    memory.reset_peak()
    losses += [entry.train(*BATCH) for _ in range(STEPS - 1)]
    return entry, losses, early


def _worker(rank: int, setup: Callable[..., None], args: argparse.Namespace, port: int, name: str, queue: Any) -> None:
    setup(rank, args, port)
    if available(name):
        train(name, 60_000)[0].close()  # what an engine loads and keeps whatever the model
        before = memory.now()
        entry, losses, early = train(name, args.elements)
        sizes = [(value - before) / args.elements for value in (memory.now(), memory.peak(), early)]
        queue.put((entry.name, losses, sizes))
    dist.barrier()
    dist.destroy_process_group()


def formula(name: str, ranks: int) -> float | None:
    """Model states in bytes a parameter: bf16 weights and gradients, fp32 master and two moments."""
    stage = name.removeprefix("Tessera ")
    weights, grads, states = 2.0, 2.0, 12.0
    if not stage.isdigit():
        return None
    if int(stage) >= 1:
        states /= ranks
    if int(stage) >= 2:
        grads /= ranks
    if int(stage) >= 3:
        weights /= ranks
    return weights + grads + states


def run(
    args: argparse.Namespace, setup: Callable[..., None], free_port: Callable[[], int], environment: dict[str, str]
) -> dict[str, list[float]]:
    """Resident after the steps, peak of later steps, peak of construction and first step, by engine; largest rank."""
    context = mp.get_context("spawn")
    found: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    os.environ.update(environment)  # read by glibc when the ranks start
    for name in args.peers:
        queue = context.SimpleQueue()
        mp.spawn(_worker, (setup, args, free_port(), name, queue), nprocs=args.ranks)
        while not queue.empty():
            engine, mine, sizes = queue.get()
            losses[engine] = mine
            found[engine] = [max(pair) for pair in zip(sizes, found.get(engine, sizes), strict=True)]
    for name in environment:
        os.environ.pop(name)
    same_losses(losses, set(losses), 0.05)
    return found


def bench_memory(args: argparse.Namespace, setup: Callable[..., None], free_port: Callable[[], int]) -> Result:
    args.elements = 12_000_000 if args.quick else 60_000_000
    exact = run(args, setup, free_port, EXACT)
    default = exact if args.quick else run(args, setup, free_port, DEFAULT)
    formulas = {name: formula(name, args.ranks) for name in exact}
    rows = []
    for name, sizes in exact.items():
        expected = formulas[name]
        cells = [*sizes, default[name][RESIDENT], max(default[name])]
        rows.append([name, "-" if expected is None else f"{expected:.1f}", *(f"{value:.1f}" for value in cells)])
    header = ["engine", "formula", f"after {STEPS} steps", "peak of later steps", "peak of construction and first step"]
    text = [
        f"{args.elements / 1e6:g} M parameters in {LAYERS} layers, bf16 with fp32 master: resident memory beyond that "
        "of the same process after it trained a model of 60,000 parameters, largest rank, in bytes a parameter. The "
        "formula counts weights, gradients and optimizer states; buckets on their way come on top. Measured with an "
        "allocator that returns freed memory to the system at once (MALLOC_MMAP_THRESHOLD_=65536), and with glibc's "
        "default, which keeps part of it (the last two columns"
        + ("; not measured in quick mode)." if args.quick else ")."),
        table([*header, f"default: after {STEPS} steps", "default: peak"], rows),
    ]
    names = ("resident", "peak", "first_peak")
    data = {
        kind: {name: dict(zip(names, sizes, strict=True)) for name, sizes in found.items()}
        for kind, found in (("memory", exact), ("memory_default_allocator", default))
    }

    def plot(path: Any) -> None:
        from plots import memory_bars

        memory_bars(path, exact, formulas, args.ranks)

    return Result(text, data, goals_of(exact, default, formulas), plot)


def goals_of(
    exact: dict[str, list[float]], default: dict[str, list[float]], formulas: dict[str, float | None]
) -> list[Goal]:
    """Peers with the allocator that suits them better."""
    goals = []
    for name, expected in formulas.items():
        if expected is not None:
            goals.append(Goal(f"{name}: after {STEPS} steps, over formula", exact[name][RESIDENT] / expected, 1.05))
            goals.append(Goal(f"{name}: peak of later steps over formula", exact[name][LATER] / expected, 1.05))
        stage = name.removeprefix("Tessera ")
        for peer, limit in ((f"DeepSpeed {stage}", 0.65), (f"FSDP2 as ZeRO-{stage}", 0.8)):
            if name.startswith("Tessera") and peer in exact:
                own, other = (min(max(exact[n]), max(default[n])) for n in (name, peer))
                goals.append(Goal(f"{name}: peak over that of {peer}", own / other, limit))
    return goals
