"""Bytes a parameter, each engine in processes of its own."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gpt as gpt_model
import memory
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from limits import gradient_bytes, state_bytes
from measure import same_losses, warm_products
from models import GPT_SIZES, elements_of, gpt
from report import Result, table
from trainers import available, build, parse

from suites.memory_goals import Figures, goals_of, headline_of

STEPS = 5
ALIKE = 2  # of them: later losses depend on how an engine rounds its 16-bit weights
TOKENS = 16  # so that model states are nearly everything
# Freed memory goes back to the system at once, so that resident memory is what is really held. glibc's default keeps
# what was freed below its own, moving threshold.
EXACT, DEFAULT = {"MALLOC_MMAP_THRESHOLD_": "65536"}, {}
WORST = 28  # bytes a parameter of the hungriest peer that holds everything, while it is built


@dataclass(frozen=True)
class Job:
    peer: str
    size: str
    bf16: bool


def batch_of(size: str) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(
        0, 256, (1, min(TOKENS, GPT_SIZES[size].context) + 1), generator=torch.Generator().manual_seed(1)
    )
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def activations(size: str, bf16: bool) -> int:
    """Bytes that autograd keeps for the backward beside weights."""
    model = gpt(size).to(torch.bfloat16 if bf16 else torch.float32)
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*batch_of(size))
    del loss
    return sum(size for pointer, size in saved.items() if pointer not in own)


def train(job: Job, size: str) -> tuple[Any, list[float], int]:
    """A few steps of a fresh model; the peak of its construction and first step too."""
    torch.manual_seed(0)
    memory.reset_peak()
    entry = build(job.peer, gpt(size), job.bf16)
    losses = [entry.train(*batch_of(size))]
    early = memory.peak()
    memory.reset_peak()
    losses += [entry.train(*batch_of(size)) for _ in range(STEPS - 1)]
    return entry, losses, early


def together() -> tuple[int, int]:
    """This rank's part of what all ranks hold, and what it has of others' parts, when all of them hold it."""
    dist.barrier()
    parts = memory.proportional(), memory.of_others()
    dist.barrier()
    return parts


def _worker(rank: int, setup: Callable[..., None], args: argparse.Namespace, port: int, job: Job, queue: Any) -> None:
    setup(rank, args, port)
    gpt_model.Linear.wide = False  # no fp32 copies of weights
    if available(job.peer):
        train(job, "tiny")[0].close()  # what an engine loads and keeps whatever the model
        warm_products(gpt(job.size).to(torch.bfloat16 if job.bf16 else torch.float32), batch_of(job.size))
        memory.trim()
        before, held, (part, others) = memory.now(), memory.held(), together()
        entry, losses, early = train(job, job.size)
        sizes = [memory.held() - held, memory.peak() - before, early - before]
        own = parse(job.peer).kind == "tessera"
        buckets = entry.engine.core.memory().peak_buckets if own else 0
        last_part, last_others = together()
        sizes = [size - (last_others - others) for size in sizes]
        queue.put((entry.name, losses, [*sizes, buckets, last_part - part]))
    dist.barrier()
    dist.destroy_process_group()


def needed(job: Job, elements: int, ranks: int) -> int:
    """Bytes on the host, roughly."""
    spec = parse(job.peer)
    sharded = spec.kind == "fsdp2" or (spec.kind in ("tessera", "deepspeed") and spec.stage > 0)
    return elements * (WORST + 8 * ranks if sharded else WORST * ranks)


def fits(job: Job, elements: int, ranks: int) -> bool:
    return needed(job, elements, ranks) < 0.8 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def run(
    args: argparse.Namespace,
    setup: Callable[..., None],
    free_port: Callable[[], int],
    environment: dict[str, str],
    jobs: list[Job],
    elements: int,
) -> dict[str, Figures]:
    """By engine; of the rank with the most, in bytes a parameter."""
    context = mp.get_context("spawn")
    found: dict[str, Figures] = {}
    losses: dict[str, list[float]] = {}
    os.environ.update(environment)  # read by glibc when the ranks start
    for job in jobs:
        queue = context.SimpleQueue()
        mp.spawn(_worker, (setup, args, free_port(), job, queue), nprocs=args.ranks)
        while not queue.empty():
            engine, mine, sizes = queue.get()
            losses[engine] = mine
            figures = Figures(*(size / elements for size in sizes))
            found[engine] = figures.most(found[engine]) if engine in found else figures
            found[engine].peer = job.peer
    for name in environment:
        os.environ.pop(name)
    clipped = {name for name in losses if not found[name].spec.early}  # of the others the first step compares
    if clipped:
        same_losses({name: mine[:ALIKE] for name, mine in losses.items()}, clipped, 0.05)
    return found


def rows_of(found: dict[str, Figures], default: dict[str, Figures]) -> list[list[str]]:
    rows = []
    for name, f in found.items():
        cells = [f"{of:.2f}" for of in (f.buckets, f.kept, f.formula)] if f.formula else ["-"] * 3
        cells += [f"{value:.2f}" for value in (f.resident, f.later, f.first)]
        cells += [f"{f.later / f.formula:.3f}" if f.formula else "-", f"{f.host:.2f}"]
        other = default.get(name)
        rows.append([name, *cells, *([f"{other.resident:.1f}", f"{other.peak:.1f}"] if other else ["-", "-"])])
    return rows


def intro(args: argparse.Namespace) -> str:
    return (
        f"GPTs on one row of {TOKENS} tokens: resident memory beyond that of the same process after it trained a "
        "small model, largest rank, in bytes a parameter; shared memory is divided among the ranks that have it. "
        "Where no number is given, bf16 means 14 bytes of states (exact) for Tessera and fp32 masters for the others; "
        "FSDP2 with 8 bytes and DeepSpeed with 10 round to nearest. Kept: weights, master and moments, as the stage "
        "divides them, and the most buckets that the engine had for what is on its way. Formula: gradients and "
        "activations besides. All ranks together: Pss. Measured with an allocator "
        "that returns freed memory to the system at once (MALLOC_MMAP_THRESHOLD_=65536); the last two columns with "
        "glibc's default, which keeps part of it" + (" (not measured in quick mode)." if args.quick else " (in bf16).")
    )


def bench_memory(args: argparse.Namespace, setup: Callable[..., None], free_port: Callable[[], int]) -> Result:
    header = ["engine", "buckets", "kept", "formula", f"after {STEPS} steps", "peak of later steps"]
    header += ["peak of construction and first step", "later peak / formula", "all ranks: after"]
    header += ["default: after", "default: peak"]
    result = Result([intro(args)], {"memory": {}, "memory_default_allocator": {}}, how="One run of each engine.")
    pictures: dict[str, dict[str, Figures]] = {}
    for size in args.sizes:
        elements = elements_of(gpt(size))
        for precision in args.precisions or (["bf16"] if args.quick else ["fp32", "bf16"]):
            bf16, title = precision == "bf16", f"{size}, {precision}"
            jobs = [Job(peer, size, bf16) for peer in args.peers if bf16 or parse(peer).states is None]
            fitting = [job for job in jobs if fits(job, elements, args.ranks)]
            found = run(args, setup, free_port, EXACT, fitting, elements)
            plain = [job for job in fitting if bf16 and not args.quick and parse(job.peer).states is None]
            default = run(args, setup, free_port, DEFAULT, plain, elements)
            extra = activations(size, bf16) / elements
            for figures in found.values():
                spec = parse(figures.peer)
                if spec.kind == "tessera" and not (spec.shared or spec.early):
                    states = state_bytes(bf16, spec.states, spec.stage, args.ranks)
                    figures.formula = states + figures.buckets + extra
                    figures.kept = states - gradient_bytes(bf16, spec.stage, args.ranks) + figures.buckets
            result.text.append(f"## {title}, {elements / 1e6:.1f} M parameters, activations {extra:.2f}")
            result.text.append(table(header, rows_of(found, default)))
            if len(fitting) < len(jobs):
                left = ", ".join(job.peer for job in jobs if job not in fitting)
                result.text.append(f"Left out, because this machine has not enough memory: {left}.")
            result.goals += goals_of(title, found, default)
            result.headline += headline_of(title, found)
            for key, of in (("memory", found), ("memory_default_allocator", default)):
                result.data[key][title] = {name: f.data() for name, f in of.items()}
            pictures[title] = found

    def plot(path: Any) -> None:
        from plots import memory_bars

        title, of = list(pictures.items())[-1]
        bars = {name: [f.resident, f.later, f.first] for name, f in of.items()}
        memory_bars(path, title, bars, {name: f.formula or None for name, f in of.items()}, args.ranks)

    result.plot = plot
    return result
