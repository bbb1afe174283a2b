"""Checkpoints: saving, the stall of saving in the background, loading; beside what the disk and one copy of the states
need in the same run."""

from __future__ import annotations

import argparse
import pathlib
import shutil
import tempfile
import time
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from disk import forget, read_seconds, size_of, sync_seconds, write_seconds
from measure import median, ratio, summary, together
from models import GPT_SIZES, elements_of, gpt
from report import Goal, Result, cell, table
from trainers import Trainer, build, installed

DISK, COPY = "disk", "memory copy"
SAVE, LOAD, STALL = 1.1, 1.2, 1.2  # times what disk and memory need
Seconds = dict[str, dict[str, list[float]]]  # by trainer and what was timed


class Saver:
    """One way to keep a run on the disk. `on_disk`: save() returns when everything is there."""

    def __init__(self, name: str, entry: Trainer, on_disk: bool = False) -> None:
        self.name, self.entry, self.on_disk = name, entry, on_disk

    def save(self, folder: pathlib.Path) -> None:
        raise NotImplementedError

    def start(self, folder: pathlib.Path) -> Any:
        """Saves in the background; what finish() takes. None: this way has no such thing."""
        return None

    def finish(self, started: Any) -> None:
        pass

    def load(self, folder: pathlib.Path) -> None:
        raise NotImplementedError

    def values(self) -> list[torch.Tensor]:
        model = getattr(self.entry.model, "module", self.entry.model)
        return [param.detach().clone() for param in model.parameters()]


class Tessera(Saver):
    def save(self, folder: pathlib.Path) -> None:
        self.entry.engine.save_checkpoint(folder, tag="x")

    def start(self, folder: pathlib.Path) -> Any:
        return self.entry.engine.save_checkpoint(folder, tag="x", asynchronous=True)

    def finish(self, started: Any) -> None:
        self.entry.engine.wait_for_checkpoint()

    def load(self, folder: pathlib.Path) -> None:
        self.entry.engine.load_checkpoint(folder, "x")


class DeepSpeed(Saver):
    def save(self, folder: pathlib.Path) -> None:
        self.entry.engine.save_checkpoint(str(folder), tag="x")

    def load(self, folder: pathlib.Path) -> None:
        self.entry.engine.load_checkpoint(str(folder), tag="x")


class TorchSave(Saver):
    """Rank 0 writes."""

    def save(self, folder: pathlib.Path) -> None:
        if self.entry.rank == 0:
            state = {"model": self.entry.model.state_dict(), "optimizer": self.entry.optimizer.state_dict()}
            torch.save(state, folder / "state.pt")
        together()

    def load(self, folder: pathlib.Path) -> None:
        state = torch.load(folder / "state.pt")
        self.entry.model.load_state_dict(state["model"])
        self.entry.optimizer.load_state_dict(state["optimizer"])


class Dcp(Saver):
    """torch.distributed.checkpoint."""

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.entry.model, self.entry.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: pathlib.Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state(), checkpoint_id=folder)

    def start(self, folder: pathlib.Path) -> Any:
        import torch.distributed.checkpoint as dcp

        return dcp.async_save(self.state(), checkpoint_id=folder)

    def finish(self, started: Any) -> None:
        started.result()

    def load(self, folder: pathlib.Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.entry.model, self.entry.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


def savers(args: argparse.Namespace, size: str, batch: tuple[Any, ...]) -> list[Saver]:
    """Each on an engine or a loop that has trained a step, so that there are moments."""
    found: list[Saver] = []
    plain: Trainer | None = None
    for peer in args.peers:
        if not installed("deepspeed:1" if peer.startswith("deepspeed") else "autograd"):
            continue
        torch.manual_seed(0)
        if peer in ("torch.save", "dcp"):
            if plain is None:
                plain = build("bare" if args.ranks == 1 else "ddp", gpt(size), False)
                plain.rank = args.rank
                plain.train(*batch)
            found.append(TorchSave(peer, plain) if peer == "torch.save" else Dcp("DCP", plain))
            continue
        entry = build(peer, gpt(size), False)
        entry.train(*batch)
        own = peer.startswith("tessera")
        found.append((Tessera if own else DeepSpeed)(entry.name, entry, on_disk=own))
    return found


def timed(work: Any, *what: Any) -> tuple[float, Any]:
    together()
    start = time.perf_counter()
    result = work(*what)
    return time.perf_counter() - start, result


def check(saver: Saver, folder: pathlib.Path, batch: tuple[Any, ...]) -> None:
    """A load brings back what was saved, or there is no number."""
    before = saver.values()
    saver.save(folder)
    saver.entry.train(*batch)
    if all(torch.equal(a, b) for a, b in zip(before, saver.values(), strict=True)):
        raise RuntimeError(f"{saver.name}: a step changes nothing")
    saver.load(folder)
    if not all(torch.equal(a, b) for a, b in zip(before, saver.values(), strict=True)):
        raise RuntimeError(f"{saver.name}: a load brings other weights than were saved")


class Rounds:
    """One folder for each trainer, anew in every round; rank 0 makes it."""

    def __init__(self, args: argparse.Namespace, root: pathlib.Path) -> None:
        self.root, self.first = root, args.rank == 0
        self.seconds: Seconds = defaultdict(lambda: defaultdict(list))
        self.bytes: dict[str, int] = {}

    def fresh(self, name: str) -> pathlib.Path:
        folder = self.root / name.replace(" ", "-")
        if self.first:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        together()
        return folder

    def limits(self, name: str, size: int, folder: pathlib.Path) -> None:
        """What disk and memory need for the same bytes, at about the same time."""
        mine = self.seconds[name]
        if self.first:
            probe = self.fresh_file(folder)
            mine["disk write"].append(write_seconds(probe, size))
            probe.unlink()
            read_seconds(folder)
            mine["disk warm"].append(read_seconds(folder))
            forget(folder)
            mine["disk cold"].append(read_seconds(folder))
        together()

    def fresh_file(self, folder: pathlib.Path) -> pathlib.Path:
        return folder.parent / "probe"

    def one(self, saver: Saver, counts: bool) -> None:
        folder = self.fresh(saver.name)
        seconds: dict[str, float] = {}
        seconds["save"], _ = timed(saver.save, folder)
        seconds["sync"] = sync_seconds(folder) if self.first and not saver.on_disk else 0.0
        self.bytes[saver.name] = size_of(folder)
        if counts:
            self.limits(saver.name, self.bytes[saver.name], folder)
        read_seconds(folder)
        seconds["warm"], _ = timed(saver.load, folder)
        together()
        if self.first:
            forget(folder)
        seconds["cold"], _ = timed(saver.load, folder)
        folder = self.fresh(saver.name)
        stall, started = timed(saver.start, folder)
        if started is not None:
            seconds["stall"] = stall
            saver.finish(started)
        self.fresh(saver.name)
        if counts and self.first:
            for key, value in seconds.items():
                self.seconds[saver.name][key].append(value)


def copies(size: int, rounds: int) -> list[float]:
    """Seconds of a copy of as many bytes to memory that is there already."""
    source, target = torch.ones(size // 4), torch.ones(size // 4)
    return [timed(target.copy_, source)[0] for _ in range(rounds + 1)][1:]


def measure(args: argparse.Namespace, size: str, root: pathlib.Path) -> tuple[Rounds, dict[str, list[float]]]:
    context = GPT_SIZES[size].context
    text = torch.randint(0, 256, (args.rows, context + 1), generator=torch.Generator().manual_seed(1))
    batch = (text[:, :-1].contiguous(), text[:, 1:].contiguous())
    entries = savers(args, size, batch)
    rounds = Rounds(args, root)
    for saver in entries:
        check(saver, rounds.fresh(saver.name), batch)
    for number in range(args.rounds + 1):
        for saver in entries:
            rounds.one(saver, counts=number > 0)
    states = {name: copies(count // args.ranks, args.rounds) for name, count in rounds.bytes.items()}
    for entry in {id(saver.entry): saver.entry for saver in entries}.values():
        entry.close()
    return rounds, states


def rows_of(rounds: Rounds, states: dict[str, list[float]]) -> list[list[str]]:
    rows = []
    for name, seconds in rounds.seconds.items():
        size = rounds.bytes[name]
        whole = [a + b for a, b in zip(seconds["save"], seconds["sync"], strict=True)]
        row = [name, f"{size / 1e6:.0f}", f"{cell(summary(seconds['save'], 1), 2)} s"]
        row += [f"{size / median(whole) / 1e9:.2f}", cell(ratio(whole, seconds["disk write"]), 2)]
        if "stall" in seconds:
            row += [f"{cell(summary(seconds['stall']), 0)} ms", cell(ratio(seconds["stall"], states[name]), 2)]
        else:
            row += ["-", "-"]
        for kind in ("warm", "cold"):
            row += [f"{cell(summary(seconds[kind], 1), 2)} s", cell(ratio(seconds[kind], seconds[f"disk {kind}"]), 2)]
        rows.append(row)
    return rows


HEADER = [
    "saved by", "MB", "save returns", "GB/s on disk", "x disk", "stall", "x copy", "load, page cache", "x reading",
    "load, cold", "x reading",
]  # fmt: skip


def shares(size: str, name: str, rounds: Rounds, copy: list[float]) -> tuple[list[Goal], str]:
    """Goals, and a line of the index."""
    seconds = rounds.seconds[name]
    figures = {
        "save": (median(seconds["save"]) / median(seconds["disk write"]), SAVE),
        "load from the page cache": (median(seconds["warm"]) / median(seconds["disk warm"]), LOAD),
        "cold load": (median(seconds["cold"]) / median(seconds["disk cold"]), LOAD),
        "stall": (median(seconds["stall"]) / median(copy), STALL),
    }
    line = (
        f"{size}: {rounds.bytes[name] / median(seconds['save']) / 1e9:.2f} GB/s, {figures['save'][0]:.2f}x the disk; "
        f"stall {figures['stall'][0]:.2f}x a copy"
    )
    return [Goal(f"{size}, {name}: {what}, x limit", *figure) for what, figure in figures.items()], line


def bench_checkpoint(args: argparse.Namespace) -> Result:
    text = [
        "GPTs in fp32 with AdamW: a plain loop has the same bytes, weight and two moments. 'x disk': until it is on "
        "the disk (where a library does not wait for that, with an fsync of its files after it), beside one file of "
        "as many bytes in aligned blocks of 4 MiB, 8 on their way, past the page cache, with its fsync. 'stall': how "
        "long the training loop stands still for a save in the background, beside one copy of the bytes in memory. "
        "'x reading': a load beside reading the files once by 8 threads; 'page cache': they were read before, 'cold': "
        "the cache was told to forget them. Probes are taken in every round beside each save."
    ]
    goals: list[Goal] = []
    headline: list[str] = []
    data: dict[str, Any] = {}
    where = args.folder_of_checkpoints or tempfile.gettempdir()
    root = [tempfile.mkdtemp(prefix="tessera-bench-", dir=where) if args.rank == 0 else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(root)
    folder = pathlib.Path(root[0])
    try:
        for size in args.sizes:
            rounds, states = measure(args, size, folder)
            if args.rank != 0:
                continue
            text += [
                f"## GPT {size}, {elements_of(gpt(size)) / 1e6:.0f} M parameters",
                table(HEADER, rows_of(rounds, states)),
            ]
            data[size] = {
                name: {key: summary(values) for key, values in {**seconds, "copy": states[name]}.items()}
                | {"bytes": rounds.bytes[name]}
                for name, seconds in rounds.seconds.items()
            }
            for name in rounds.seconds:
                if name.startswith("Tessera"):
                    found, line = shares(size, name, rounds, states[name])
                    goals += found
                    headline.append(line)
    finally:
        together()
        if args.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return Result(text, {"checkpoint": data}, goals, headline=headline)
