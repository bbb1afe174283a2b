"""What one rank does: train one row of the loss tables, or measure memory or times. Rank 0 writes the result."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import memory
import torch
import torch.distributed as dist
from measure import gate, interleaved, summaries, warm_products
from measure import probe as probe_machine
from text import Text
from torch import Tensor

from tables.modes import BASELINE, Recipe, Row, available, build
from tables.settings import Experiment, Settings, model_of, read_text

STATE_STEPS = 5
TOLERANCE = 0.05  # of the losses of the first steps, before times are taken: the formats differ, the training must not


@dataclass(frozen=True)
class Task:
    kind: str  # "start", "train", "memory" or "times"
    key: str
    seed: int
    folder: str  # for start weights, results and logs
    settings: str

    @property
    def stem(self) -> str:
        return f"{self.kind}-{self.key}-{self.seed}"

    def path(self, suffix: str) -> Path:
        return Path(self.folder, self.stem + suffix)


def start_weights(task: Task) -> Path:
    return replace(task, kind="start", key=BASELINE).path(".pt")


# ---- training


def batch_of(text: Text, seed: int, step: int, rows: int) -> tuple[Tensor, Tensor]:
    """Every seed reads the text in an order of its own; all ranks' rows together do not depend on their number."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return text.batch((seed << 32) + step, rank, ranks, rows)


@torch.no_grad()
def held_out_loss(row: Row, text: Text, settings: Settings) -> float:
    """All ranks do the same, so that it serves partitioned parameters too."""
    losses = [row.model(x, y).item() for x, y in text.held_out_batches(8, settings.eval_batches)]
    return float(sum(losses) / len(losses))


def digest(tensors: list[Tensor] | None) -> str | None:
    """One number for all bits."""
    if tensors is None:
        return None
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def train(row: Row, experiment: Experiment, text: Text, settings: Settings, seed: int) -> list[float]:
    """The mean loss over the ranks, of every step."""
    losses = torch.zeros(experiment.steps, dtype=torch.float64)
    for step in range(experiment.steps):
        row.set_lr(experiment.rate(step))
        losses[step] = row.train(*batch_of(text, seed, step, settings.rows))
    dist.all_reduce(losses)
    return [float(loss) for loss in losses / dist.get_world_size()]


def run_experiment(experiment: Experiment, task: Task, settings: Settings) -> dict[str, Any]:
    model = model_of(settings.size, task.seed)
    if experiment.from_start:
        model.load_state_dict(torch.load(start_weights(task)))
    recipe = Recipe(experiment.lr, experiment.betas, settings.rows, settings.stage, task.seed, reference=True)
    text = read_text(experiment.text, model.options.context)
    row = build(task.key, model, recipe)
    before = held_out_loss(row, text, settings)
    losses = train(row, experiment, text, settings, task.seed)
    result = {
        "losses": losses,
        "before": before,
        "held_out": held_out_loss(row, text, settings),
        "masters": digest(row.masters()),
    }
    row.close()
    return result


def run_train(task: Task, settings: Settings) -> dict[str, Any]:
    return {e.name: run_experiment(e, task, settings) for e in settings.experiments}


def run_start(task: Task, settings: Settings) -> dict[str, Any]:
    """Start weights of one seed: fp32, by one rank."""
    experiment = settings.start
    model = model_of(settings.size, task.seed)
    text = read_text(experiment.text, model.options.context)
    row = build("fp32", model, Recipe(experiment.lr, experiment.betas, settings.rows, 0, task.seed))
    train(row, experiment, text, settings, task.seed)
    torch.save(model.state_dict(), start_weights(task))
    return {"held_out": held_out_loss(row, text, settings)}


# ---- memory and times


def state_recipe(settings: Settings) -> Recipe:
    return Recipe(1e-4, (0.9, 0.95), 1, settings.stage, 0)


def state_batch(settings: Settings, size: str) -> tuple[Tensor, Tensor]:
    text = read_text(settings.experiments[0].text, model_of(size, 0).options.context)
    return batch_of(text, 0, 0, 1)


def run_memory(task: Task, settings: Settings) -> dict[str, Any]:
    """Bytes that construction and a few steps of a fresh model add; of the rank with the most."""

    def steps(size: str) -> tuple[Row, int]:
        batch = state_batch(settings, size)
        model = model_of(size, 0)
        elements = sum(p.numel() for p in model.parameters())
        row = build(task.key, model, state_recipe(settings))
        for _ in range(STATE_STEPS):
            row.train(*batch)
        return row, elements

    steps("tiny")[0].close()  # what an engine loads and keeps whatever the model
    size = settings.state_size
    warm_products(model_of(size, 0).to(torch.bfloat16), state_batch(settings, size))
    memory.trim()
    memory.reset_peak()
    before, held = memory.now(), memory.held()
    row, elements = steps(size)
    sizes = torch.tensor([memory.held() - held, memory.peak() - before])
    dist.all_reduce(sizes, dist.ReduceOp.MAX)
    row.close()
    return {"allocated": int(sizes[0]), "peak": int(sizes[1]), "parameters": elements}


def run_times(task: Task, settings: Settings) -> dict[str, Any]:
    """All rows take turns in one process a rank. They must train alike first, or there is no number."""
    keys = [key for key in settings.keys if key != "plain-ties-up" and available(key)]
    batch = state_batch(settings, settings.state_size)
    before = probe_machine()
    rows = [build(key, model_of(settings.state_size, 0), state_recipe(settings)) for key in keys]
    gate(list(rows), batch, TOLERANCE)
    times = interleaved(list(rows), batch, settings.rounds)
    probe: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(probe, [before, probe_machine()])
    whole = {key: times[row.name].whole for key, row in zip(keys, rows, strict=True)}
    named = summaries(times)
    phases = {key: named[row.name] for key, row in zip(keys, rows, strict=True)}
    return {"whole": whole, "phases": phases, "probe": probe}


RUNS = {"start": run_start, "train": run_train, "memory": run_memory, "times": run_times}


def main(path: str) -> None:
    task = Task(**json.loads(Path(path).read_text()))
    warnings.filterwarnings("ignore", category=FutureWarning)  # of peers' own calls
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = RUNS[task.kind](task, Settings.load(task.settings))
    if dist.get_rank() == 0:
        task.path(".json").write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # peers leave threads behind
