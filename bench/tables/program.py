"""make tables: the two tables of low-precision training on real text, for plain PyTorch, each mode of Tessera and,
where it is installed, DeepSpeed.

The first table is memory and step time, the second the loss, in two experiments: pre-training at a large learning rate,
and fine-tuning on another text at lr 2e-5. Every row starts from the same weights and sees the same data, for each of
several seeds. The report goes to bench/reports/.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from pathlib import Path

import torch
from report import ROOT

from tables import page, place, worker
from tables.jobs import JobError, Progress, run_all
from tables.modes import BASELINE, MODES, PARTNERS, available, formula
from tables.settings import LIBRARY, REFERENCE, SIZES, Experiment, Settings, parameters_of
from tables.worker import Task

SETTING = ("steps", "tune_steps", "start_steps", "seeds", "size", "rounds")
FULL = (400, 250, 500, 3, "3M", 7)
QUICK = (40, 30, 60, 1, "1M", 3)
STATE_SIZES = {  # on the CPU, on an accelerator
    "full": (("30M",), ("254M", "7B")),
    "quick": (("10M",), ("30M",)),
}
SHARE = 0.8  # of an accelerator's free memory, that the states of rows which take turns may have
DEFAULT = [key for key in MODES if key != "fp32"]


def options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python bench/tables", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", default=REFERENCE, help="text of the pre-training and of the start weights: a file, or a folder with "
        "train.txt and valid.txt; default: %(default)s")  # fmt: skip
    add("--tune-data", default=LIBRARY, help="text of the fine-tuning; default: %(default)s")
    add("--steps", type=int, help="of the pre-training")
    add("--tune-steps", type=int, help="of the fine-tuning")
    add("--start-steps", type=int, help="of the pre-training in fp32 that makes the start weights of the fine-tuning")
    add("--seeds", type=int, help="number of seeds; default 3")
    add("--contenders", nargs="+", choices=MODES, metavar="ROW", default=DEFAULT, help=f"of {', '.join(MODES)}")
    add("--size", choices=SIZES, help="of the GPT that is trained, default 3M")
    add("--state-size", nargs="+", choices=SIZES, metavar="SIZE", help="of the GPTs whose memory and times are "
        "measured; default 30M, on an accelerator 254M and 7B, the models of DeepSpeed's own tables")  # fmt: skip
    add("--device", default=place.default(), help="where the models are: cpu, or an accelerator of torch such as cuda; "
        "default: the accelerator, if there is one")  # fmt: skip
    add("--rows", type=int, default=2, help="sequences of a rank and step, default %(default)s")
    add("--stage", type=int, default=1, choices=(0, 1, 2, 3), help="of ZeRO, default %(default)s")
    add("--ranks", type=int, default=1)
    add("--rounds", type=int, help="of the times, default 7")
    add("--jobs", type=int, help="trainings at a time; default: as many as the cores can take")
    add("--out", type=Path, help="folder of the report")
    add("--quick", action="store_true", help="a look in a minute or two; the report goes to build/bench-quick")
    args = parser.parse_args(arguments)
    for name, value in zip(SETTING, QUICK if args.quick else FULL, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    if min(getattr(args, name) for name in SETTING if name != "size") < 1:
        parser.error("steps, seeds and rounds must be at least 1")
    if args.device not in (place.CPU, place.default()):
        parser.error(f"--device {args.device}: this torch finds no such accelerator here")
    if args.device != place.CPU and args.ranks > 1:
        parser.error("--device: several ranks are for the CPU; on an accelerator there is one")
    sizes = STATE_SIZES["quick" if args.quick else "full"]
    args.state_size = args.state_size or sizes[args.device != place.CPU]
    args.out = args.out or (ROOT / "build" / "bench-quick" if args.quick else ROOT / "bench" / "reports")
    side_by_side = (os.cpu_count() or 1) // args.ranks if args.device == place.CPU else 1
    args.jobs = args.jobs or max(1, side_by_side)
    args.command = " ".join(["python bench/tables", *map(shlex.quote, arguments)])
    return args


def rows_of(wanted: list[str]) -> list[str]:
    """In the order of MODES: the wanted rows that are available, the baseline, and the partners of what is there."""
    missing = [key for key in wanted if not available(key)]
    if missing:
        print(f"left out, because deepspeed is not installed: {', '.join(missing)}", file=sys.stderr)
    present = {BASELINE, *wanted} - set(missing)
    partners = {PARTNERS[key] for key in present if key in PARTNERS}
    return [key for key in MODES if key in present | partners]


def settings_of(args: argparse.Namespace) -> Settings:
    def experiment(name: str, text: str, steps: int, lr: float, beta2: float, from_start: bool) -> Experiment:
        source = text if text in (REFERENCE, LIBRARY) else str(Path(text).resolve())
        return Experiment(name, source, steps, lr, (0.9, beta2), max(1, steps // 10), from_start)

    pre = experiment("pre-training", args.data, args.steps, 1e-3, 0.999, False)
    tune = experiment("fine-tuning", args.tune_data, args.tune_steps, 2e-5, 0.95, True)
    start = experiment("start", args.data, args.start_steps, 1e-3, 0.999, False)
    return Settings(
        experiments=(pre, tune),
        start=start,
        keys=tuple(rows_of(args.contenders)),
        seeds=tuple(range(args.seeds)),
        size=args.size,
        state_sizes=tuple(args.state_size),
        rows=args.rows,
        eval_batches=8 if args.quick else 16,
        stage=args.stage,
        ranks=args.ranks,
        rounds=args.rounds,
        device=args.device,
    )


def take_turns(size: str, settings: Settings) -> bool:
    """Whether all rows of a model fit at once."""
    states = sum(formula(MODES[key], settings.stage, settings.ranks) for key in worker.measured(settings.keys))
    return states * parameters_of(size) <= SHARE * place.room(settings.device)


def run(settings: Settings, jobs: int, folder: str) -> page.Results:
    """The times first, alone on the machine; then start weights; then trainings and memory side by side."""
    text = settings.dump()
    measured = worker.measured(settings.keys)

    def tasks(kind: str, keys: tuple[str, ...], seeds: tuple[int, ...], size: str = "") -> list[Task]:
        return [Task(kind, key, seed, folder, text, size) for seed in seeds for key in keys]

    starts = tasks("start", (BASELINE,), settings.seeds)
    trainings = tasks("train", settings.keys, settings.seeds)
    times, memories = [], []
    for size in settings.state_sizes:
        times += tasks("times", (worker.TOGETHER,) if take_turns(size, settings) else measured, (0,), size)
        memories += tasks("memory", measured, (0,), size)
    progress = Progress(sum(map(len, (starts, trainings, memories, times))))

    def ranks(task: Task) -> int:
        return 1 if task.kind == "start" else settings.ranks

    found = run_all(times, ranks, 1, progress)
    run_all(starts, ranks, jobs, progress)
    found |= run_all(trainings + memories, ranks, jobs, progress)
    return page.Results(
        train={k: {t.seed: found[t] for t in trainings if t.key == k} for k in settings.keys},
        states={
            size: page.States(
                parameters=parameters_of(size),
                memory={task.key: found[task] for task in memories if task.size == size},
                times=[found[task] for task in times if task.size == size],
            )
            for size in settings.state_sizes
        },
    )


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--worker"]:
        worker.main(arguments[1])
        return
    args = options(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tessera-tables-") as folder:
        try:
            settings = settings_of(args)
            results = run(settings, args.jobs, folder)
        except JobError as error:
            sys.exit(f"tables: {error}")
    print(page.write(args.out, page.name_of(settings), args.command, settings, results, args.quick))
