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

import torch
import torch.distributed as dist
from measure import gate, interleaved, summaries, warm_products
from measure import probe as probe_machine
from text import Text
from torch import Tensor

from tables import place
from tables.modes import BASELINE, Recipe, Row, available, build
from tables.settings import SIZES, Experiment, Settings, model_of, read_text

STATE_STEPS = 5
TOGETHER = "all"  # in place of a row's key: all of them take turns
FULL = "out_of_memory"  # in place of a result, where the device has too little
TOLERANCE = 0.05  # of the losses of the first steps, before times are taken: the formats differ, the training must not


@dataclass(frozen=True)
class Task:
    kind: str  # "start", "train", "memory" or "times"
    key: str
    seed: int
    folder: str  # for start weights, results and logs
    settings: str
    size: str = ""  # of the model of memory and times

    @property
    def stem(self) -> str:
        return "-".join(filter(None, (self.kind, self.key, str(self.seed), self.size)))

    def path(self, suffix: str) -> Path:
        return Path(self.folder, self.stem + suffix)


def start_weights(task: Task) -> Path:
    return replace(task, kind="start", key=BASELINE).path(".pt")


# ---- training


def on(device: str, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, y = batch
    return x.to(device), y.to(device)


def batch_of(text: Text, seed: int, step: int, rows: int, device: str) -> tuple[Tensor, Tensor]:
    """Every seed reads the text in an order of its own; all ranks' rows together do not depend on their number."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return on(device, text.batch((seed << 32) + step, rank, ranks, rows))


@torch.no_grad()
def held_out_loss(row: Row, text: Text, settings: Settings) -> float:
    """All ranks do the same, so that it serves partitioned parameters too."""
    batches = text.held_out_batches(8, settings.eval_batches)
    losses = [row.model(*on(settings.device, batch)).item() for batch in batches]
    return float(sum(losses) / len(losses))


def digest(tensors: list[Tensor] | None) -> str | None:
    """One number for all bits."""
    if tensors is None:
        return None
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().cpu().numpy().tobytes())
    return found.hexdigest()


def train(row: Row, experiment: Experiment, text: Text, settings: Settings, seed: int) -> list[float]:
    """The mean loss over the ranks, of every step."""
    losses = torch.zeros(experiment.steps, dtype=torch.float64)
    for step in range(experiment.steps):
        row.set_lr(experiment.rate(step))
        losses[step] = row.train(*batch_of(text, seed, step, settings.rows, settings.device))
    dist.all_reduce(losses)
    return [float(loss) for loss in losses / dist.get_world_size()]


def run_experiment(experiment: Experiment, task: Task, settings: Settings) -> dict[str, Any]:
    model = model_of(settings.size, task.seed, settings.device)
    if experiment.from_start:
        model.load_state_dict(torch.load(start_weights(task), map_location=settings.device))
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
    model = model_of(settings.size, task.seed, settings.device)
    text = read_text(experiment.text, model.options.context)
    row = build("fp32", model, Recipe(experiment.lr, experiment.betas, settings.rows, 0, task.seed))
    train(row, experiment, text, settings, task.seed)
    torch.save(model.state_dict(), start_weights(task))
    return {"held_out": held_out_loss(row, text, settings)}


# ---- memory and times


def measured(keys: tuple[str, ...]) -> tuple[str, ...]:
    """The loop whose ties go up is there for its bits only."""
    return tuple(key for key in keys if key != "plain-ties-up" and available(key))


def state_recipe(settings: Settings) -> Recipe:
    return Recipe(1e-4, (0.9, 0.95), 1, settings.stage, 0)


def state_batch(settings: Settings, size: str) -> tuple[Tensor, Tensor]:
    text = read_text(settings.experiments[0].text, SIZES[size].context)
    return batch_of(text, 0, 0, 1, settings.device)


def run_memory(task: Task, settings: Settings) -> dict[str, Any]:
    """Bytes that construction and a few steps of a fresh model add; of the rank with the most."""
    device = settings.device

    def steps(size: str) -> Row:
        batch = state_batch(settings, size)
        row = build(task.key, model_of(size, 0, device), state_recipe(settings))
        for _ in range(STATE_STEPS):
            row.train(*batch)
        return row

    steps("tiny").close()  # what an engine loads and keeps whatever the model
    if device == place.CPU:
        warm_products(model_of(task.size, 0, device).to(torch.bfloat16), state_batch(settings, task.size))
    before, held = place.start_peak(device), place.held(device)
    row = steps(task.size)
    sizes = torch.tensor([place.held(device) - held, place.peak(device) - before])
    dist.all_reduce(sizes, dist.ReduceOp.MAX)
    row.close()
    return {"allocated": int(sizes[0]), "peak": int(sizes[1])}


def run_times(task: Task, settings: Settings) -> dict[str, Any]:
    """The rows of one process a rank take turns. They must train alike first, or there is no number."""
    device = settings.device

    def finish() -> None:
        place.finish(device)

    keys = measured(settings.keys) if task.key == TOGETHER else (task.key,)
    batch = state_batch(settings, task.size)
    before = probe_machine(device, finish)
    rows = [build(key, model_of(task.size, 0, device), state_recipe(settings)) for key in keys]
    gate(list(rows), batch, TOLERANCE)
    times = interleaved(list(rows), batch, settings.rounds, finish=finish)
    probe: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(probe, [before, probe_machine(device, finish)])
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
    try:
        result = RUNS[task.kind](task, Settings.load(task.settings))
    except torch.OutOfMemoryError as error:
        if not task.size:
            raise
        result = {FULL: str(error).splitlines()[0]}
    if dist.get_rank() == 0:
        task.path(".json").write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # peers leave threads behind
