"""A vision-language model in three layouts on equal ranks, at growing numbers of vision tokens: the tower over ranks
that share its tokens and a tensor-parallel language model (hybrid), all of it tensor parallel, ZeRO-3."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import memory
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import median, probe, same_losses, summary
from report import Goal, Result, cell, table
from tessera.hybrid import Layout, Link, hand_over

import tessera
from suites.hybrid_cost import HYBRID, UNIFORM, ZERO3, Sizes, Step, cost, fit, idle_rows, published_rows

LAYOUTS = {"hybrid": HYBRID, "tensor": UNIFORM, "zero3": ZERO3}
PIXELS = [112, 224, 448, 896]  # of a picture's side: 64 to 4096 patches
SIZES = {"vision": 128, "text": 256, "depth": 4, "layers": 4, "heads": 8}
SMALL = {"vision": 32, "text": 64, "depth": 2, "layers": 2, "heads": 4}
WORDS = 8  # of a row beside its picture
TURNS = 2  # processes of each layout and size, layouts in turns
GATE = 3  # steps whose losses are compared
TOLERANCE = 2e-3  # fp32, AdamW's first steps at lr 1e-3, sums in other orders
WANTED = 1.3  # times tensor parallel's speed
CONFIG = {
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
RULES = [
    {"patterns": [r".*attn\.qkv\.weight$"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0},
    {"patterns": [r".*(attn\.proj|o_proj|down_proj|merger\.mlp\.2)\.weight$"], "partition_type": "row"},
    {"patterns": [r".*([qkv]_proj|gate_proj|up_proj|merger\.mlp\.0)\.weight$"], "partition_type": "column"},
]


def example() -> tuple[Any, Any]:
    """The modules of examples/hybrid, which need Transformers (requirements/test.txt)."""
    folder = str(Path(__file__).parents[2] / "examples" / "hybrid")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import model
    import pictures

    return model, pictures


@dataclass(frozen=True)
class Job:
    layout: str
    pixels: int
    small: bool
    rounds: int

    @property
    def sizes(self) -> dict[str, int]:
        return SMALL if self.small else SIZES

    def step(self, ranks: int) -> Step:
        s, pictures = self.sizes, example()[1]
        sizes = Sizes(
            s["depth"], s["vision"], 2 * s["vision"], s["depth"] // 2, 16,
            s["layers"], s["text"], 2 * s["text"], 0.5, len(pictures.IDS),
        )  # fmt: skip
        return Step(sizes, ranks, ranks, (self.pixels // pictures.PATCH) ** 2, WORDS)


class Trainer:
    """One step of all ranks' pictures. `groups`: those that everything is sent through."""

    groups: list[Any]
    beside = 0  # bytes of a step that no group counts

    def step(self, batch: Any) -> torch.Tensor:
        raise NotImplementedError


class Hybrid(Trainer):
    """Each rank has a part of the tower's tokens and a slice of the language model: two engines on the same ranks."""

    def __init__(self, job: Job, rank: int, ranks: int) -> None:
        parts = example()[0]
        config = CONFIG | {"train_micro_batch_size_per_gpu": ranks}
        sp, tp = (tessera.c10d_group(dist.new_group().group_name) for _ in range(2))
        self.groups = [sp, tp]
        axis = tessera.Axis
        tower = parts.Tower(new_model(job), sp, rank, ranks)
        self.tower = tessera.Engine(
            tower, config | {"zero_optimization": {"stage": 1}}, group=tessera.Mesh().set(axis.Sp, sp)
        )
        text = config | {"tensor_parallel": {"autotp_size": ranks}}
        language = parts.language_of(new_model(job))
        self.language = tessera.Engine(language, text, group=tessera.Mesh().set(axis.Tp, tp))
        store = dist.distributed_c10d._get_default_store()
        link = Link("x", Layout(sequence=ranks), Layout(replicas=ranks), 0, 0, timeout=120)
        self.ends = link.sender(store, rank, self.tower), link.receiver(store, rank, self.language)
        self.count = 0

    def step(self, batch: Any) -> torch.Tensor:
        tokens = self.tower(batch.patches, batch.grid)
        images = hand_over(*self.ends, tokens, self.count)
        loss = self.language(images, batch.ids, batch.grid, batch.labels)
        loss.backward()
        tessera.step_together([self.tower, self.language])
        self.count += 1
        self.beside = tokens.nbytes + images.nbytes  # forward, and the gradient of all tokens
        return loss


class Uniform(Trainer):
    def __init__(self, job: Job, rank: int, ranks: int) -> None:
        cut = {"autotp_size": ranks, "partition_config": {"use_default_specs": False, "layer_specs": RULES}}
        config = CONFIG | {"train_micro_batch_size_per_gpu": ranks, "tensor_parallel": cut}
        self.groups = [tessera.c10d_group(dist.group.WORLD.group_name)]
        mesh = tessera.Mesh().set(tessera.Axis.Tp, self.groups[0])
        self.engine = tessera.Engine(new_model(job), config, group=mesh)

    def step(self, batch: Any) -> torch.Tensor:
        loss = example()[0].whole_loss(self.engine, batch)
        loss.backward()
        self.engine.step()
        return loss


class Zero3(Trainer):
    """Each rank has a picture of its own."""

    def __init__(self, job: Job, rank: int, ranks: int) -> None:
        config = CONFIG | {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        self.groups = [tessera.c10d_group(dist.group.WORLD.group_name)]
        self.engine = tessera.Engine(new_model(job), config, group=self.groups[0])
        self.rank, self.ranks = rank, ranks

    def step(self, batch: Any) -> torch.Tensor:
        rows = slice(self.rank, self.rank + 1)
        pixels = batch.patches.chunk(self.ranks)[self.rank]
        mine = type(batch)(pixels, batch.grid[rows], batch.ids[rows], batch.labels[rows])
        loss = example()[0].whole_loss(self.engine, mine)
        loss.backward()
        self.engine.step()
        return loss


TRAINERS: dict[str, Callable[[Job, int, int], Trainer]] = {"hybrid": Hybrid, "tensor": Uniform, "zero3": Zero3}


def new_model(job: Job) -> Any:
    parts = example()[0]
    return parts.whole_model(parts.configuration(**job.sizes))


def sent_by(trainer: Trainer) -> int:
    """Bytes since the last call."""
    total = 0
    for group in trainer.groups:
        stats = group.stats()
        kinds = (stats.all_gather, stats.reduce_scatter, stats.all_reduce, stats.broadcast, stats.all_to_all)
        total += sum(kind.bytes for kind in kinds)
        group.reset_stats()
    return total


def worker(rank: int, setup: Callable[..., None], args: argparse.Namespace, port: int, job: Job, queue: Any) -> None:
    setup(rank, args, port)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    memory.trim()
    memory.reset_peak()
    before = memory.now()
    trainer = TRAINERS[job.layout](job, rank, args.ranks)
    losses, seconds = [], []
    for number in range(GATE + job.rounds):
        batch = example()[1].batch(number % GATE, args.ranks, job.pixels)
        sent_by(trainer)
        dist.barrier()
        begin = time.perf_counter()
        loss = trainer.step(batch).detach()
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
        dist.all_reduce(loss)
        losses.append(float(loss) / args.ranks)
    sent = sent_by(trainer) + trainer.beside
    peak = memory.peak() - before
    dist.barrier()
    queue.put((losses[:GATE], seconds[GATE:], sent, peak))
    dist.barrier()
    dist.destroy_process_group()


@dataclass
class Found:
    losses: list[float]
    seconds: list[float]
    sent: int  # of the rank with the most
    peak: int


def measure(args: argparse.Namespace, setup: Callable[..., None], free_port: Callable[[], int], job: Job) -> Found:
    forks = mp.get_context("forkserver")
    forks.set_forkserver_preload(
        ["__main__", "tessera", "torch._dynamo", "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"]
    )
    queue = forks.SimpleQueue()
    arguments = (setup, args, free_port(), job, queue)
    mp.start_processes(worker, arguments, nprocs=args.ranks, start_method="forkserver")
    ranks = [queue.get() for _ in range(args.ranks)]
    slowest = [max(times) for times in zip(*(rank[1] for rank in ranks), strict=True)]
    return Found(ranks[0][0], slowest, max(rank[2] for rank in ranks), max(rank[3] for rank in ranks))


def turns_of(args: argparse.Namespace) -> int:
    return min(TURNS, args.rounds)


def jobs_of(args: argparse.Namespace) -> Iterator[Job]:
    for pixels in PIXELS[:1] if args.quick else PIXELS:
        for layout in args.peers:
            yield Job(layout, pixels, args.quick, -(-args.rounds // turns_of(args)))


def measure_all(args: argparse.Namespace, setup: Callable[..., None], free_port: Callable[[], int]) -> dict[Job, Found]:
    """Layouts in turns, so that what slows the machine for a while slows none of them alone."""
    found = {job: Found([], [], 0, 0) for job in jobs_of(args)}
    for pixels in dict.fromkeys(job.pixels for job in found):
        for _ in range(turns_of(args)):
            for job, so_far in found.items():
                if job.pixels != pixels:
                    continue
                more = measure(args, setup, free_port, job)
                so_far.losses = more.losses
                so_far.seconds += more.seconds
                so_far.sent, so_far.peak = more.sent, max(so_far.peak, more.peak)
    return found


def bench_hybrid(args: argparse.Namespace, setup: Callable[..., None], free_port: Callable[[], int]) -> Result:
    before = probe()
    found = measure_all(args, setup, free_port)
    for pixels in {job.pixels for job in found}:
        losses = {job.layout: mine.losses for job, mine in found.items() if job.pixels == pixels}
        same_losses(losses, set(losses), TOLERANCE)
    ratios = ratios_of(found, args.ranks)
    text = [
        intro(args),
        table(HEADER, rows_of(found, args.ranks)),
        PUBLISHED_TEXT,
        table(PUBLISHED_HEADER, published_rows()),
    ]
    text += [IDLE_TEXT, table(IDLE_HEADER, idle_rows())]
    goals, headline = [], []
    if ratios:
        goals.append(Goal("tensor parallel's time over hybrid's, most patches", ratios[max(ratios)], WANTED, True))
        low, high = min(ratios.values()), max(ratios.values())
        fastest = ratios_of(found, args.ranks, min)
        headline.append(
            f"tensor parallel's time over hybrid's: {low:.2f} to {high:.2f}; of the fastest steps, most patches: "
            f"{fastest[max(fastest)]:.2f}"
        )
    worst = max(abs(cost(LAYOUTS[j.layout], j.step(args.ranks)).sent / f.sent - 1) for j, f in found.items())
    goals.append(Goal("bytes sent beside the model's, worst deviation", worst, 0.1))
    steps = turns_of(args) * -(-args.rounds // turns_of(args))
    how = (
        f"Medians of {steps} steps (min-max) of the slowest rank, each layout and size {turns_of(args)} times in "
        "processes of its own, layouts in turns."
    )
    return Result(text, {"hybrid": data_of(found)}, goals, headline=headline, how=how, probe=[[before, probe()]])


HEADER = ["patches a picture", "layout", "ms a step", "ms, model", "MB sent", "MB, model", "MB peak"]
PUBLISHED_HEADER = ["patches", ZERO3, "model", UNIFORM, "model", HYBRID, "model", "hybrid / tensor", "model"]
PUBLISHED_TEXT = (
    "The same model of Qwen2.5-VL-32B on 8 H100, tokens/s as published and as the model has them, again fitted to "
    "tensor parallel and ZeRO-3. It knows nothing of memory; 128 words a row and a batch of 8 are assumptions."
)
IDLE_HEADER = ["patches", "arithmetic of the tower", "its ranks", "waiting, 4 micro-batches", "32"]
IDLE_TEXT = (
    "With the two groups on GPUs of their own instead, by arithmetic alone: the best division of 8, and the share of "
    "time that GPUs then wait."
)


def intro(args: argparse.Namespace) -> str:
    return (
        f"A Qwen2.5-VL of {SMALL if args.quick else SIZES} in fp32, {args.ranks} pictures a step, each rank bound to a "
        "core. Hybrid: the tower over ranks that share its tokens (ZeRO-1), the language model tensor parallel, both "
        "on all ranks. Losses of the first steps are compared first. Times of the model are a sum over arithmetic, "
        "bytes and activations, with factors fitted to tensor parallel and ZeRO-3; those of hybrid it predicts. Bytes "
        "are of the rank that sends the most; the peak is over what a process has before it builds the model."
    )


def ratios_of(found: dict[Job, Found], ranks: int, of: Callable[[list[float]], float] = median) -> dict[int, float]:
    """Tensor parallel's time over hybrid's, by patches."""
    seconds = {(job.pixels, job.layout): of(mine.seconds) for job, mine in found.items()}
    return {
        job.step(ranks).patches: seconds[job.pixels, "tensor"] / seconds[job.pixels, "hybrid"]
        for job in found
        if job.layout == "hybrid" and (job.pixels, "tensor") in seconds
    }


def rows_of(found: dict[Job, Found], ranks: int) -> list[list[str]]:
    fitted = [job for job in found if job.layout != "hybrid"] or list(found)
    costs = {job: cost(LAYOUTS[job.layout], job.step(ranks)) for job in found}
    rates = fit([costs[job] for job in fitted], [median(found[job].seconds) for job in fitted])
    return [
        [
            str(job.step(ranks).patches),
            LAYOUTS[job.layout],
            cell(summary(mine.seconds)),
            f"{rates.seconds(costs[job]) * 1e3:.1f}",
            f"{mine.sent / 1e6:.2f}",
            f"{costs[job].sent / 1e6:.2f}",
            f"{mine.peak / 1e6:.0f}",
        ]
        for job, mine in found.items()
    ]


def data_of(found: dict[Job, Found]) -> dict[str, Any]:
    return {
        f"{LAYOUTS[job.layout]} {job.pixels}": {"ms": summary(mine.seconds), "sent": mine.sent, "peak": mine.peak}
        for job, mine in found.items()
    }
