"""Measuring: rounds in which every trainer takes its turn, medians with spread, probes of the machine."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from trainers import Trainer

GATE_STEPS = 5
PHASES = ("forward", "backward", "step")


@dataclass
class Times:
    """Seconds of each round; of the construction and the first step, once."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    construction: float = 0.0
    first_step: float = 0.0

    @property
    def whole(self) -> list[float]:
        return [sum(parts) for parts in zip(self.forward, self.backward, self.step, strict=True)]


def median(seconds: list[float]) -> float:
    return statistics.median(seconds)


def summary(values: list[float], scale: float = 1e3) -> dict[str, float]:
    """Milliseconds, with the default scale."""
    return {"median": median(values) * scale, "min": min(values) * scale, "max": max(values) * scale}


def summaries(times: dict[str, Times]) -> dict[str, Any]:
    """For the JSON file, milliseconds."""
    return {
        name: {"whole": summary(t.whole)}
        | {phase: summary(getattr(t, phase)) for phase in PHASES}
        | {"construction": t.construction * 1e3, "first_step": t.first_step * 1e3}
        for name, t in times.items()
    }


def ratio(own: list[float], other: list[float]) -> dict[str, float]:
    """The ratio of the medians, and the least and the greatest ratio within one round."""
    rounds = [a / b for a, b in zip(own, other, strict=True)]
    return {"median": median(own) / median(other), "min": min(rounds), "max": max(rounds)}


def difference(own: list[float], other: list[float], scale: float) -> dict[str, float]:
    rounds = [(a - b) * scale for a, b in zip(own, other, strict=True)]
    return {"median": (median(own) - median(other)) * scale, "min": min(rounds), "max": max(rounds)}


def together() -> None:
    """Waits until all ranks are here."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def shared_cores() -> bool:
    return dist.is_initialized() and dist.get_world_size() > (os.cpu_count() or 1)


def nothing() -> None:
    pass


Pair = tuple[torch.Tensor, torch.Tensor]


def long_enough(
    size: int, most: int, make: Callable[[int], Pair], work: Callable[..., None], finish: Callable[[], None]
) -> Pair:
    """What make() gives for `size` or a power of two times it: work() on it takes a millisecond, or it is `most`.
    Devices differ more than processors do."""
    while True:
        pair = make(size)
        work(*pair)
        finish()
        start = time.perf_counter()
        work(*pair)
        finish()
        if size >= most or time.perf_counter() - start > 1e-3:
            return pair
        size *= 2


def bandwidth(device: str = "cpu", finish: Callable[[], None] = nothing) -> float:
    """GB/s of y = a*x + y over arrays of 256 MiB (read 2, write 1), best of 10: the roof of an optimizer pass. All
    ranks at once; where they share cores, until all are through: one that has a core for itself for a while says
    nothing. Smaller arrays stay in the last cache of large processors, more or less from run to run. `finish` waits
    for the device."""

    def arrays(n: int) -> Pair:
        return torch.ones(n, device=device), torch.ones(n, device=device)

    def work(x: torch.Tensor, y: torch.Tensor) -> None:
        y.add_(x, alpha=0.5)

    x, y = arrays(64 << 20) if device == "cpu" else long_enough(1 << 18, 64 << 20, arrays, work, finish)
    best = 0.0
    together()
    for _ in range(10):
        finish()
        start = time.perf_counter()
        work(x, y)
        finish()
        if shared_cores():
            together()
        best = max(best, 12 * x.numel() / (time.perf_counter() - start) / 1e9)
    together()
    return best


def arithmetic(device: str = "cpu", finish: Callable[[], None] = nothing) -> float:
    """GFLOP/s of a product of fp32 matrices that stay in the cache (on a device: that keep it busy), best of 10. All
    ranks at once. A neighbour that computes takes this from us and leaves the bandwidth as it is."""

    def matrices(n: int) -> Pair:
        return torch.ones(n, n, device=device), torch.empty(n, n, device=device)

    def work(x: torch.Tensor, y: torch.Tensor) -> None:
        torch.mm(x, x, out=y)

    x, y = matrices(128) if device == "cpu" else long_enough(128, 4096, matrices, work, finish)
    n, calls = len(x), 50 if device == "cpu" else 5
    best = 0.0
    together()
    for _ in range(10):
        finish()
        start = time.perf_counter()
        for _ in range(calls):
            work(x, y)
        finish()
        best = max(best, 2 * n**3 * calls / (time.perf_counter() - start) / 1e9)
    together()
    return best


def probe(device: str = "cpu", finish: Callable[[], None] = nothing) -> dict[str, float]:
    """By the names in report.PROBES."""
    return {"bandwidth": bandwidth(device, finish), "arithmetic": arithmetic(device, finish)}


def warm_products(model: torch.nn.Module, batch: tuple[Any, ...]) -> None:
    """A backward of a plain model of the size that follows: for products of that size the matrix library keeps buffers
    (14 MB where the processor has AMX), which belong to no engine and its states."""
    model(*batch).backward()


def gate(entries: list[Trainer], batch: tuple[Any, ...], tolerance: float) -> None:
    """Losses of the first steps: every trainer must agree with the first one that trains, or there is no number."""
    gate_cycles(entries, [batch], tolerance)


def same_losses(losses: dict[str, list[float]], trains: set[str], tolerance: float) -> None:
    reference = next(name for name in losses if name in trains)
    for name, mine in losses.items():
        steps = len(mine) if name in trains else 1
        pairs = list(zip(mine, losses[reference], strict=True))[:steps]
        if max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs) > tolerance:
            raise RuntimeError(f"{name} trains to other losses than {reference}: {mine} and {losses[reference]}")


def new_times(entry: Trainer) -> Times:
    return Times(construction=entry.construction, first_step=entry.first_step or 0.0)


def interleaved(
    entries: list[Trainer],
    batch: tuple[Any, ...],
    rounds: int,
    warmup: int = 1,
    finish: Callable[[], None] = nothing,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:
    """One step of each trainer, then one of each again, ...; after `warmup` rounds that are not counted. `finish`
    waits for the device that computes."""
    times = {entry.name: new_times(entry) for entry in entries}
    for number in range(warmup + rounds):
        for entry in entries:
            finish()
            together()
            start = clock()
            loss = entry.forward(*batch)
            finish()
            forward = clock()
            entry.backward(loss)
            finish()
            backward = clock()
            entry.step()
            finish()
            end = clock()
            if number < warmup:
                continue
            mine = times[entry.name]
            mine.forward.append(forward - start)
            mine.backward.append(backward - forward)
            mine.step.append(end - backward)
    return times


def gate_cycles(entries: list[Trainer], batches: list[tuple[Any, ...]], tolerance: float) -> None:
    """As gate, with an update from several batches."""
    losses = {entry.name: [entry.cycle(batches) for _ in range(GATE_STEPS)] for entry in entries}
    same_losses(losses, {e.name for e in entries if e.trains}, tolerance)


def interleaved_cycles(
    entries: list[Trainer], batches: list[tuple[Any, ...]], rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of whole cycles: one of each trainer, then one of each again, ..."""
    seconds: dict[str, list[float]] = {entry.name: [] for entry in entries}
    for number in range(warmup + rounds):
        for entry in entries:
            together()
            start = time.perf_counter()
            entry.cycle(batches)
            if number >= warmup:
                seconds[entry.name].append(time.perf_counter() - start)
    return seconds


def each_call(prepare: Callable[[], Callable[[], object]], finish: Callable[[], object], calls: int) -> float:
    """Median seconds of what prepare() returns; finish() runs after each, not timed."""
    seconds = []
    for _ in range(calls):
        run = prepare()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
        finish()
    return median(seconds)
