"""What one rank of the tables does: train an engine, or measure its memory or times. Rank 0 hands over the result."""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import device
import torch
import torch.distributed as dist
from gpt import Gpt
from measure import gate, interleaved, probe, summaries, warm_products
from models import GPT_SIZES
from text import Text, load_text
from torch import Tensor
from trainers import Recipe, Trainer, build

REFERENCE, LIBRARY = "the language reference of this Python", "the sources of this Python's library"
CONTEXT = 128  # bytes of a sequence at most, of models whose size is not one of an accelerator's
STATE_STEPS = 5
TOGETHER = "all engines"  # in place of one: they take turns
FULL = "out_of_memory"  # in place of a result, where the device has too little
TOLERANCE = 0.05  # of the losses of the first steps, before times are taken: the formats differ, the training must not


@dataclass(frozen=True)
class Experiment:
    """One training: text, steps and rates. The learning rate warms up linearly, then follows a cosine to a tenth."""

    name: str
    text: str
    steps: int
    lr: float
    betas: tuple[float, float]
    warmup: int
    from_start: bool  # begins with the start weights of its seed, not with random ones

    def rate(self, step: int) -> float:
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * done))


@dataclass(frozen=True)
class Settings:
    experiments: tuple[Experiment, ...]
    start: Experiment  # makes the start weights, in fp32 by plain PyTorch
    peers: tuple[str, ...]
    seeds: tuple[int, ...]
    size: str
    state_sizes: tuple[str, ...]  # of the models whose memory and times are measured
    rows: int  # sequences of a rank and step
    eval_batches: int
    ranks: int
    rounds: int
    device: str
    folder: str  # of start weights

    @property
    def measured(self) -> tuple[str, ...]:
        """The loop whose ties go up is there for its bits only."""
        return tuple(peer for peer in self.peers if peer != "bare+up")


@dataclass(frozen=True)
class Task:
    kind: str  # "start", "train", "memory" or "times"
    peer: str
    seed: int = 0
    size: str = ""  # of the model of memory and times

    def __str__(self) -> str:
        return f"{self.kind} of {self.peer}, " + (self.size or f"seed {self.seed}")


def model_of(size: str, seed: int, where: str) -> Gpt:
    """Built where it is used: on the host a large one would take minutes, and four bytes a parameter."""
    torch.manual_seed(seed)
    with torch.device(where):
        return Gpt(GPT_SIZES[size])


def context_of(size: str) -> int:
    context = GPT_SIZES[size].context
    return context if context > 256 else min(context, CONTEXT)


def read_text(source: str, context: int) -> Text:
    """`source`: REFERENCE, LIBRARY, a file, or a folder with train.txt and valid.txt."""
    if source == REFERENCE:
        return Text(load_text(), context)
    if source == LIBRARY:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        return Text(b"\n\n".join(file.read_bytes() for file in files), context)
    path = Path(source)
    if not path.is_dir():
        return Text(path.read_bytes(), context)
    train, held_out = ((path / name).read_bytes() for name in ("train.txt", "valid.txt"))
    text = Text(train, context)
    text.train, text.held_out = (torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in (train, held_out))
    return text


# ---- training


def on(where: str, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, y = batch
    return x.to(where), y.to(where)


def batch_of(text: Text, seed: int, step: int, rows: int, where: str) -> tuple[Tensor, Tensor]:
    """Every seed reads the text in an order of its own; all ranks' rows together do not depend on their number."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return on(where, text.batch((seed << 32) + step, rank, ranks, rows))


@torch.no_grad()
def held_out_loss(entry: Trainer, text: Text, settings: Settings) -> float:
    """All ranks do the same, so that it serves partitioned parameters too."""
    batches = text.held_out_batches(8, settings.eval_batches)
    losses = [entry.model(*on(settings.device, batch)).item() for batch in batches]
    return float(sum(losses) / len(losses))


def digest(tensors: list[Tensor] | None) -> str | None:
    """One number for all bits."""
    if tensors is None:
        return None
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().cpu().numpy().tobytes())
    return found.hexdigest()


def train(entry: Trainer, experiment: Experiment, text: Text, settings: Settings, seed: int) -> list[float]:
    """The mean loss over the ranks, of every step."""
    losses = torch.zeros(experiment.steps, dtype=torch.float64)
    for step in range(experiment.steps):
        entry.set_lr(experiment.rate(step))
        losses[step] = entry.train(*batch_of(text, seed, step, settings.rows, settings.device))
    dist.all_reduce(losses)
    return [float(loss) for loss in losses / dist.get_world_size()]


def start_weights(settings: Settings, seed: int) -> Path:
    return Path(settings.folder, f"start-{seed}.pt")


def loop_or_ddp(peer: str) -> str:
    """The plain loop, over DDP where there are several ranks."""
    return "ddp" + peer.removeprefix("bare") if peer.startswith("bare") and dist.get_world_size() > 1 else peer


def run_experiment(experiment: Experiment, task: Task, settings: Settings) -> dict[str, Any]:
    model = model_of(settings.size, task.seed, settings.device)
    if experiment.from_start:
        model.load_state_dict(torch.load(start_weights(settings, task.seed), map_location=settings.device))
    recipe = Recipe(experiment.lr, experiment.betas, settings.rows, task.seed, written_out=True)
    text = read_text(experiment.text, context_of(settings.size))
    entry = build(loop_or_ddp(task.peer), model, True, recipe=recipe)
    before = held_out_loss(entry, text, settings)
    losses = train(entry, experiment, text, settings, task.seed)
    result = {
        "losses": losses,
        "before": before,
        "held_out": held_out_loss(entry, text, settings),
        "masters": digest(entry.masters()),
    }
    entry.close()
    return result


def run_train(task: Task, settings: Settings) -> dict[str, Any]:
    return {e.name: run_experiment(e, task, settings) for e in settings.experiments}


def run_start(task: Task, settings: Settings) -> dict[str, Any]:
    """Start weights of one seed: fp32, by one rank."""
    experiment = settings.start
    model = model_of(settings.size, task.seed, settings.device)
    text = read_text(experiment.text, context_of(settings.size))
    recipe = Recipe(experiment.lr, experiment.betas, settings.rows)
    train(build("bare", model, False, recipe=recipe), experiment, text, settings, task.seed)
    torch.save(model.state_dict(), start_weights(settings, task.seed))
    return {}


# ---- memory and times


def state_batch(settings: Settings, size: str) -> tuple[Tensor, Tensor]:
    return batch_of(read_text(settings.experiments[0].text, context_of(size)), 0, 0, 1, settings.device)


def run_memory(task: Task, settings: Settings) -> dict[str, Any]:
    """Bytes that construction and a few steps of a fresh model add; of the rank with the most."""
    where = settings.device

    def steps(size: str) -> Trainer:
        batch = state_batch(settings, size)
        entry = build(loop_or_ddp(task.peer), model_of(size, 0, where), True)
        for _ in range(STATE_STEPS):
            entry.train(*batch)
        return entry

    steps("tiny").close()  # what an engine loads and keeps whatever the model
    if where == device.CPU:
        warm_products(model_of(task.size, 0, where).to(torch.bfloat16), state_batch(settings, task.size))
    before, held = device.start_peak(where), device.held(where)
    entry = steps(task.size)
    sizes = torch.tensor([device.held(where) - held, device.peak(where) - before])
    dist.all_reduce(sizes, dist.ReduceOp.MAX)
    entry.close()
    return {"allocated": int(sizes[0]), "peak": int(sizes[1])}


def run_times(task: Task, settings: Settings) -> dict[str, Any]:
    """The engines of one process a rank take turns. They must train alike first, or there is no number."""
    where = settings.device

    def finish() -> None:
        device.finish(where)

    peers = settings.measured if task.peer == TOGETHER else (task.peer,)
    batch = state_batch(settings, task.size)
    before = probe(where, finish)
    entries = [build(loop_or_ddp(peer), model_of(task.size, 0, where), True) for peer in peers]
    gate(entries, batch, TOLERANCE)
    times = interleaved(entries, batch, settings.rounds, finish=finish)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [before, probe(where, finish)])
    named = summaries(times)
    names = dict(zip(peers, [entry.name for entry in entries], strict=True))
    return {
        "whole": {peer: times[name].whole for peer, name in names.items()},
        "phases": {peer: named[name] for peer, name in names.items()},
        "probe": found,
    }


RUNS = {"start": run_start, "train": run_train, "memory": run_memory, "times": run_times}


def worker(
    rank: int,
    setup: Callable[..., None],
    args: argparse.Namespace,
    port: int,
    task: Task,
    settings: Settings,
    queue: Any,
) -> None:
    setup(rank, args, port)
    try:
        result = RUNS[task.kind](task, settings)
    except torch.OutOfMemoryError as error:
        if not task.size:
            raise
        result = {FULL: str(error).splitlines()[0]}
    if rank == 0:
        queue.put(result)
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # peers leave threads behind
