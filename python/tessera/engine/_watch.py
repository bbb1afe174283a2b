"""Watch: what an engine logs while it trains: progress lines, times of its phases, memory, collectives, events of
monitors and the profile of a forward. One Watch belongs to one engine; rank 0 logs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from tessera import _core
from tessera._warnings import warn_user
from tessera.engine._report import logger, show_progress, shows_in_place
from tessera.flops import FlopsProfiler
from tessera.monitor import Monitor
from tessera.optim.engines import momentum_of

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


class Watched(Protocol):
    """What is logged of an engine."""

    @property
    def core(self) -> _core.Engine: ...
    @property
    def module(self) -> nn.Module: ...
    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None: ...
    @property
    def global_steps(self) -> int: ...
    @property
    def skipped_steps(self) -> int: ...
    def get_lr(self) -> list[Any]: ...


class Watch:
    def __init__(self, config: _core.Config, rank: int, warnings: list[tuple[str, int]]) -> None:
        """Made before the engine has a core: all that can be wrong in the configuration is an error here. `warnings`:
        warnings so far, which grow."""
        self._config = config
        self._speaks = rank == 0
        self._every: int = config.steps_per_print or 0
        self.profiler: FlopsProfiler | None = None
        self._numbers = _core.Watch(config)
        self._terminal = self._numbers.in_place
        self._listens = False
        self.calls = self._numbers.calls
        self.monitor = Monitor(config, rank, warnings)
        if config.log_level:
            logger.setLevel(_LEVELS[config.log_level])
        lines = self._every or config.wall_clock_breakdown or config.memory_breakdown or config.dump_state
        if self._speaks and (lines or self.calls is not None):
            show_progress()

    @property
    def step_seconds(self) -> dict[str, float]:
        """Seconds of the last optimizer step, by phase."""
        return self._numbers.step_seconds

    def built(self, engine: Watched) -> None:
        """The engine has its core from here on."""
        self._numbers.attach(engine.core, self._speaks)
        self._listen(engine)
        if not self._speaks:
            return
        base = engine.basic_optimizer if self._config.dump_state else None
        groups = [] if base is None else base.param_groups
        shown = [(len(group["params"]), str({k: v for k, v in group.items() if k != "params"})) for group in groups]
        self._say(self._numbers.first_lines(engine.core, shown), "")

    # ---------------------------------------------------------------- forward

    def around_forward(self, engine: Watched) -> contextlib.AbstractContextManager[None]:
        counts = self._numbers.around_forward(torch.is_grad_enabled() and engine.module.training)
        recompute = self._numbers.profiles(engine.core, engine.module.training)
        return counts if recompute is None else self._profiled(engine, counts, recompute)

    @contextlib.contextmanager
    def _profiled(self, engine: Watched, counts: _core.WatchedForward, recompute: float) -> Iterator[None]:
        """Counts and times the forward inside; the first rank shows the report."""
        self.profiler = FlopsProfiler(engine.module, recompute)
        self.profiler.start_profile()
        try:
            with counts:
                yield
        finally:
            self.profiler.end_profile()
            text, warnings = self._numbers.show_profile(engine.core, self.profiler.core)
            print(text, end="", flush=True)
            self._warn(warnings, engine.core)

    # ---------------------------------------------------------------- steps

    def stepped(self, engine: Watched) -> None:
        """Called after every optimizer step."""
        self._listen(engine)
        if self._every and self._speaks:
            self._numbers.in_place = self._terminal and shows_in_place()
        rates = [float(rate) for rate in engine.get_lr()] if self._numbers.wants_rates(engine.core) else []
        momenta = momentum_of(engine.basic_optimizer.param_groups if rates and engine.basic_optimizer else [])
        events, lines, progress, warnings = self._numbers.stepped(engine.core, rates, momenta)
        if self._speaks:
            self._warn(warnings, engine.core)
        if self.monitor.writers:
            self.monitor.write_events(events)
        if self._speaks:
            self._say(lines, progress)

    def _warn(self, lines: list[str], core: _core.Engine) -> None:
        warn_user(lines)
        for line in lines:
            self.monitor.warn(line, core.global_samples())

    def _say(self, lines: list[str], progress: str) -> None:
        if progress and not self._numbers.in_place:
            lines = [*lines, progress]
        if lines:
            self._numbers.end_line()
        for line in lines:
            logger.info("%s", line)
        if progress and self._numbers.in_place:
            self._numbers.show(f"[tessera] {progress}")

    def _listen(self, engine: Watched) -> None:
        """Writers may come at any time."""
        if self.monitor.writers and not self._listens:
            self._listens = True
            self._numbers.listen(engine.core)

    def expect(self, steps: int, tokens_per_sample: float) -> None:
        self._numbers.expect(steps, tokens_per_sample)

    def memory(self, core: _core.Engine) -> _core.MemoryUse:
        return self._numbers.memory(core)

    def count_flops(self, core: _core.Engine, per_sample: float | None, peak: float | None) -> None:
        if per_sample is not None:
            self._numbers.count_flops(core, per_sample, peak)
        else:
            self._numbers.count_flops_of_step(core, peak)

    # ---------------------------------------------------------------- collectives

    def call_rows(self, core: _core.Engine, stragglers: bool) -> tuple[list[dict[str, Any]], str]:
        """Returns one row an operation and message size, and all as text. Collective with `stragglers`: time waited for
        the slowest rank."""
        return self._numbers.call_rows(core, stragglers)

    def close(self) -> None:
        self._numbers.end_line()
        self.monitor.close()
