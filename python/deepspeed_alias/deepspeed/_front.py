"""What DeepSpeed's engine adds to the tessera.Engine that it has, while that works: classes of optimizers, pieces of
parameters that are out, sums in place of means, timers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from tessera.optim.engines import Optimizer

import tessera
from deepspeed import _optimizers, _params
from deepspeed._timers import SynchronizedWallClockTimer, ThroughputTimer
from tessera import _core
from tessera.engine import front


class Front(front.Front[tessera.Engine]):
    counts_empty_steps = True  # DeepSpeed's engine does so

    def __init__(self) -> None:
        self.averages = True
        self.timers = SynchronizedWallClockTimer()
        self.throughput = ThroughputTimer(0)

    def built(self, settings: tessera.Config, client: Any, base: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return _optimizers.checked(settings, client, base)

    def optimizer_class(self, engine: tessera.Engine) -> type[Optimizer]:
        return _optimizers.class_for(engine)

    def settle(self, engine: tessera.Engine) -> None:
        _params.settle_engine(engine)

    @contextlib.contextmanager
    def stepping(self, engine: tessera.Engine) -> Iterator[None]:
        self.settle(engine)
        steps = engine.global_steps
        sums = not self.averages and engine.is_gradient_accumulation_boundary()
        kept: dict[int, torch.Tensor] = {}
        if sums:
            engine.core.grad_norm()  # gradients have come
            kept = _sum(engine, engine.seq_dp_world_size)
        try:
            yield
        except Exception:
            if sums and engine.global_steps == steps:  # step() may be called again
                _put_back(engine, kept)
            raise
        stepped = engine.global_steps != steps
        if stepped and engine.config.wall_clock_breakdown:
            self.timers.take(engine.step_seconds)
        self.throughput.batch_size = engine.train_batch_size()
        self.throughput.stop(global_step=stepped)


def _gradients(engine: tessera.Engine) -> Iterator[tuple[int, torch.Tensor]]:
    """All gradients that are there, by the number of their parameter."""
    for number in engine.trained_numbers():
        view = engine.core.local_view(number, _core.Quantity.Gradient)
        if view is not None:
            yield number, view.detach()


def _sum(engine: tessera.Engine, ranks: int) -> dict[int, torch.Tensor]:
    """Makes the mean of `ranks` their sum. Returns what was there: a product of 16 bits cannot be divided back."""
    kept = {}
    for number, gradient in _gradients(engine):
        kept[number] = gradient.clone()
        gradient.mul_(ranks)
    return kept


def _put_back(engine: tessera.Engine, kept: dict[int, torch.Tensor]) -> None:
    for number, gradient in _gradients(engine):
        gradient.copy_(kept[number])
