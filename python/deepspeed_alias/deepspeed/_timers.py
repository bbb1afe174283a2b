"""Timers that callers read at the engine."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from deepspeed._logging import log_dist

FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce_microstep", "bwd_allreduce"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"


class ThroughputTimer:
    """Samples a second, over whole optimizer steps after the first `start_step`."""

    def __init__(self, batch_size: int, start_step: int = 2) -> None:
        self.batch_size = batch_size
        self.start_step = start_step
        self.epoch_count = 0
        self.micro_step_count = 0
        self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._begin: float | None = None

    def update_epoch_count(self) -> None:
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """The first forward of a step."""
        if self._begin is None:
            self._begin = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        self.micro_step_count += 1
        if not global_step or self._begin is None:
            return
        self.global_step_count += 1
        if self.global_step_count > self.start_step:
            self.total_elapsed_time += time.perf_counter() - self._begin
        self._begin = None

    def avg_samples_per_sec(self) -> float:
        counted = self.global_step_count - self.start_step
        return self.batch_size * counted / self.total_elapsed_time if counted > 0 else float("-inf")


class Timer:
    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self.records: list[float] = []
        self._begin = 0.0
        self._sum = 0.0

    def start(self) -> None:
        self.started_, self._begin = True, time.perf_counter()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        spent = time.perf_counter() - self._begin
        self._sum = spent if reset else self._sum + spent
        self.started_ = False
        if record:
            self.records.append(spent * 1000.0)

    def add(self, seconds: float) -> None:
        self._sum += seconds
        self.records.append(seconds * 1000.0)

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds."""
        spent = self._sum * 1000.0
        if reset:
            self._sum = 0.0
        return spent

    def mean(self) -> float:
        return sum(self.records) / len(self.records) if self.records else 0.0

    def reset(self) -> None:
        self.started_, self._sum, self.records = False, 0.0, []


class SynchronizedWallClockTimer:
    """Named timers."""

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, Timer(name))

    def take(self, seconds: dict[str, float]) -> None:
        """Takes what the engine's phases took in a step: forward, backward, step, and of these gather and reduce."""
        inner = max(0.0, seconds["backward"] - seconds["reduce"])
        found = {
            FORWARD_GLOBAL_TIMER: seconds["forward"],
            BACKWARD_GLOBAL_TIMER: seconds["backward"],
            BACKWARD_INNER_GLOBAL_TIMER: inner,
            BACKWARD_REDUCE_GLOBAL_TIMER: seconds["reduce"],
            STEP_GLOBAL_TIMER: seconds["step"],
        }
        for name, value in found.items():
            self(name).add(value)

    def has_timer(self, name: str) -> bool:
        return name in self.timers

    def log(
        self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True, ranks: Iterable[int] | None = None
    ) -> None:
        found = [
            f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in names if name in self.timers
        ]
        log_dist(f"time (ms) | {' | '.join(found)}", ranks=ranks or [0])

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        for name in means if reset else []:
            self.timers[name].reset()
        return means


class NoopTimer:
    """Timers that time nothing."""

    class Timer:
        def start(self, **_: Any) -> None: ...

        def stop(self, **_: Any) -> None: ...

        def reset(self) -> None: ...

        def elapsed(self, **_: Any) -> float:
            return 0.0

        def mean(self) -> float:
            return 0.0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> Timer:
        return self.timer

    def get_timers(self) -> dict[str, Timer]:
        return {}

    def log(self, names: Iterable[str], **_: Any) -> None: ...

    def get_mean(self, names: Iterable[str], **_: Any) -> None: ...
