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

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


class Watched(Protocol):
    """What is logged of an engine."""

    @property
    def core(self) -> _core.Engine: ...
    @property
    def module(self) -> nn.Module: ...
    @property
    def device(self) -> torch.device: ...
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
        self._memory: bool = config.memory_breakdown
        self.profile_step: int | None = config.flops_profiler.profile_step
        if not config.flops_profiler.enabled:
            self.profile_step = None
        self.profiler: FlopsProfiler | None = None
        self._numbers = _core.Watch(config)
        self._terminal = self._numbers.in_place
        self._listens = False
        self.calls = self._numbers.calls
        self.monitor = Monitor(config, rank, warnings)
        if config.log_level:
            logger.setLevel(_LEVELS[config.log_level])
        lines = self._every or config.wall_clock_breakdown or self._memory or self.calls is not None
        if self._speaks and lines:
            show_progress()

    @property
    def step_seconds(self) -> dict[str, float]:
        """Seconds of the last optimizer step, by phase."""
        return self._numbers.step_seconds

    def built(self, engine: Watched) -> None:
        """The engine has its core from here on."""
        self._numbers.attach(engine.core, self._speaks)
        self._listen(engine)
        shares = (self._config.tessera.device_share, self._config.zero_optimization.offload_optimizer.ratio)
        if self._speaks and "auto" in shares:
            logger.info("%s", engine.core.offload_plan().text())
        if self._config.dump_state and self._speaks:
            show_progress()
            logger.info("configuration\n%s", self._config.describe())
            for number, group in enumerate(engine.basic_optimizer.param_groups if engine.basic_optimizer else []):
                shown = {key: value for key, value in group.items() if key != "params"}
                logger.info("param group %d: %d parameters, %s", number, len(group["params"]), shown)

    # ---------------------------------------------------------------- forward

    def around_forward(self, engine: Watched) -> contextlib.AbstractContextManager[None]:
        if self._profiles(engine):
            return self._profiled(engine)
        return self._numbers.around_forward(torch.is_grad_enabled() and engine.module.training)

    def _profiles(self, engine: Watched) -> bool:
        """The next forward is the one to profile: the first of its optimizer step."""
        return (
            self.profile_step is not None
            and self.profiler is None
            and engine.global_steps >= self.profile_step
            and engine.module.training
        )

    @contextlib.contextmanager
    def _profiled(self, engine: Watched) -> Iterator[None]:
        """Counts and times the forward inside; the report is printed by rank 0."""
        section = self._config.flops_profiler
        self.profiler = FlopsProfiler(engine.module, recompute_fwd_factor=section.recompute_fwd_factor)
        self.profiler.start_profile()
        try:
            yield
        finally:
            self.profiler.stop_profile()
            if self._speaks:
                self.profiler.print_model_profile(
                    profile_step=engine.global_steps,
                    module_depth=section.module_depth,
                    top_modules=section.top_modules,
                    detailed=section.detailed,
                    output_file=section.output_file,
                )
            self.profiler.end_profile()

    # ---------------------------------------------------------------- steps

    def stepped(self, engine: Watched) -> None:
        """Called after every optimizer step."""
        self._listen(engine)
        if self._every and self._speaks:
            self._numbers.in_place = self._terminal and shows_in_place()
        rates = [float(rate) for rate in engine.get_lr()] if self._numbers.wants_rates(engine.core) else []
        more = f"mom={momentum_of(engine.basic_optimizer)}" if rates else ""
        events, lines, progress, warnings = self._numbers.stepped(engine.core, rates, more)
        if self._speaks:
            self._warn(warnings, engine.core)
        if self.monitor.writers:
            self.monitor.write_events(events)
        if self._memory and self._speaks and engine.global_steps % (self._every or 1) == 0:
            lines.append(f"memory (MB) | {_core.memory_text(engine.core)}{device_memory(engine.device)}")
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
        assert self.calls is not None
        return _core.call_rows(self.calls, core, stragglers)

    def close(self) -> None:
        self._numbers.end_line()
        self.monitor.close()


def momentum_of(base: torch.optim.Optimizer | None) -> list[Any]:
    """Betas of Adam-likes, else momentum, one per param group."""
    return [] if base is None else [group.get("betas", group.get("momentum", 0.0)) for group in base.param_groups]


def device_memory(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    used, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return f" | device: {used / 2**20:.1f} (peak {peak / 2**20:.1f})"
