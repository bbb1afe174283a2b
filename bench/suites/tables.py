"""Low-precision training on real text: bytes, time and loss of each mode of Tessera, plain PyTorch and DeepSpeed.

The first table is memory and step time, the others the loss, in two experiments: pre-training at a large learning rate,
and fine-tuning on another text at lr 2e-5. Every engine starts from the same weights and sees the same data, for each
of several seeds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import device
import torch.multiprocessing as mp
from models import parameters_of
from report import Result
from trainers import installed

from suites import tables_text
from suites.memory import EXACT
from suites.tables_runs import LIBRARY, REFERENCE, TOGETHER, Experiment, Settings, Task, worker
from suites.tables_text import BASELINE, PARTNERS, Results, States, formula

SHARE = 0.8  # of an accelerator's free memory, that the states of engines which take turns may have
STEPS = ((400, 250, 500), (40, 30, 60))  # of pre-training, fine-tuning and the start weights of it; in quick mode
STATE_SIZES = {False: (["30M"], ["10M"]), True: (["254M", "7B"], ["30M"])}  # by whether they are on an accelerator

Found = dict[Task, dict[str, Any]]


def settings_of(args: argparse.Namespace, folder: str) -> Settings:
    def experiment(name: str, text: str, steps: int, lr: float, beta2: float, from_start: bool) -> Experiment:
        source = text if text in (REFERENCE, LIBRARY) else str(Path(text).resolve())
        return Experiment(name, source, steps, lr, (0.9, beta2), max(1, steps // 10), from_start)

    pre, tune, start = args.steps or STEPS[args.quick]
    data, other = args.data or REFERENCE, args.tune_data or LIBRARY
    where = args.device or device.default()
    return Settings(
        experiments=(
            experiment("pre-training", data, pre, 1e-3, 0.999, False),
            experiment("fine-tuning", other, tune, 2e-5, 0.95, True),
        ),
        start=experiment("start", data, start, 1e-3, 0.999, False),
        peers=tuple(with_partners(args.peers)),
        seeds=tuple(range(args.seeds or (1 if args.quick else 3))),
        size=args.sizes[0],
        state_sizes=tuple(args.state_sizes or STATE_SIZES[where != device.CPU][args.quick]),
        rows=args.rows,
        eval_batches=8 if args.quick else 16,
        ranks=args.ranks,
        rounds=args.rounds,
        device=where,
        folder=folder,
    )


def with_partners(wanted: list[str]) -> list[str]:
    """The baseline and the loops whose bits are compared, then those that are wanted and installed."""
    there = [peer for peer in wanted if installed(peer)]
    partners = [PARTNERS[peer] for peer in there if peer in PARTNERS]
    return list(dict.fromkeys([BASELINE, *partners, *there]))


def take_turns(size: str, settings: Settings) -> bool:
    """Whether all engines' states of a model fit at once."""
    states = sum(formula(peer, settings.ranks) for peer in settings.measured)
    return states * parameters_of(size) <= SHARE * device.room(settings.device)


@contextmanager
def environment(more: dict[str, str]) -> Any:
    """Of processes that start inside."""
    os.environ.update(more)
    try:
        yield
    finally:
        for name in more:
            del os.environ[name]


def run_all(tasks: list[Task], jobs: int, start: Callable[[Task, Any], Any]) -> Found:
    """Several tasks at a time, each in processes of its own. The first failure ends everything that runs."""
    waiting, running, found = list(tasks), dict[Task, Any](), Found()
    while waiting or running:
        while waiting and len(running) < jobs:
            queue = mp.get_context("spawn").SimpleQueue()
            running[waiting[0]] = start(waiting[0], queue), queue
            waiting.pop(0)
        for task, (context, queue) in list(running.items()):
            try:
                done = context.join(0.05)
            except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
                for process in (p for other, _ in running.values() for p in other.processes):
                    process.kill()
                raise SystemExit(f"tables: {task} failed\n{error}") from None
            if not queue.empty():
                found[task] = queue.get()
            if done:
                del running[task]
                if sys.stderr.isatty():
                    print(f"{len(found)} of {len(tasks)} runs: {task}", file=sys.stderr, flush=True)
    return found


def measure(settings: Settings, jobs: int, start: Callable[[Task, Any], Any]) -> Results:
    """The times first, alone on the machine; then start weights; then trainings, and memory, side by side."""
    times, memories = [], []
    for size in settings.state_sizes:
        turns = (TOGETHER,) if take_turns(size, settings) else settings.measured
        times += [Task("times", peer, size=size) for peer in turns]
        memories += [Task("memory", peer, size=size) for peer in settings.measured]
    trainings = [Task("train", peer, seed) for seed in settings.seeds for peer in settings.peers]
    found = run_all(times, 1, start)
    run_all([Task("start", BASELINE, seed) for seed in settings.seeds], jobs, start)
    found |= run_all(trainings, jobs, start)
    with environment(EXACT):
        found |= run_all(memories, jobs, start)
    return Results(
        train={p: {t.seed: found[t] for t in trainings if t.peer == p} for p in settings.peers},
        states={
            size: States(
                parameters=parameters_of(size),
                memory={task.peer: found[task] for task in memories if task.size == size},
                times=[found[task] for task in times if task.size == size],
            )
            for size in settings.state_sizes
        },
    )


def bench_tables(args: argparse.Namespace, setup: Callable[..., None], free_port: Callable[[], int]) -> Result:
    with tempfile.TemporaryDirectory(prefix="tessera-tables-") as folder:
        settings = settings_of(args, folder)

        def start(task: Task, queue: Any) -> Any:
            mine = argparse.Namespace(**{**vars(args), "ranks": 1 if task.kind == "start" else args.ranks})
            # Forked from a process that has only imported, but for those whose allocator the environment sets.
            alone = task.kind == "memory" and settings.device == device.CPU
            method = "spawn" if alone else "forkserver"
            more = (setup, mine, free_port(), task, settings, queue)
            return mp.start_processes(worker, more, nprocs=mine.ranks, join=False, start_method=method)

        side_by_side = (os.cpu_count() or 1) // args.ranks if settings.device == device.CPU else 1
        results = measure(settings, args.jobs or max(1, side_by_side), start)
    return tables_text.result_of(settings, results)
