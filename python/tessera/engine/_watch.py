"""What an engine tells while it trains: progress lines, times of its phases, memory, collectives, events of monitors
and the profile of a forward. One Watch belongs to one engine; rank 0 speaks."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch
from torch import nn

from tessera import _core
from tessera.engine._report import logger, show_progress
from tessera.flops import FlopsProfiler
from tessera.loss_scale import LossScaler
from tessera.monitor import Event, Monitor

_PHASES = ("forward", "backward", "step", "gather", "reduce")
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
    @property
    def global_samples(self) -> int: ...
    @property
    def loss_scaler(self) -> LossScaler: ...
    def get_lr(self) -> list[Any]: ...


class Watch:
    def __init__(self, config: _core.Config, rank: int) -> None:
        """Before the engine has a core: all that can be wrong of the configuration is an error here."""
        self._config = config
        self._speaks = rank == 0
        self._every: int = config.steps_per_print or 0
        self.times_phases: bool = config.wall_clock_breakdown
        self._memory: bool = config.memory_breakdown
        self.profile_step: int | None = config.flops_profiler.profile_step
        if not config.flops_profiler.enabled:
            self.profile_step = None
        self.profiler: FlopsProfiler | None = None
        self._seconds = dict.fromkeys(_PHASES, 0.0)
        self.step_seconds: dict[str, float] = {}  # of the last optimizer step
        self.calls = self._call_record()
        self.monitor = Monitor(config, rank)
        if config.log_level:
            logger.setLevel(_LEVELS[config.log_level])
        if self._speaks and (self._every or self.times_phases or self._memory or self.calls is not None):
            show_progress()

    def _call_record(self) -> _core.CallRecord | None:
        if not self._config.comms_logger.enabled:
            return None
        every = self._config.comms_logger.prof_all
        return _core.CallRecord([] if every else self._config.comms_logger.prof_ops)

    def built(self, engine: Watched) -> None:
        """The engine has its core from here on."""
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

    def profiles(self, engine: Watched) -> bool:
        """The next forward is the one to profile: the first of its optimizer step."""
        return (
            self.profile_step is not None
            and self.profiler is None
            and engine.global_steps >= self.profile_step
            and engine.module.training
        )

    @contextlib.contextmanager
    def profiled(self, engine: Watched) -> Any:
        """Counts and times the forward inside; the report is printed by rank 0."""
        section = self._config.to_dict()["flops_profiler"]
        self.profiler = FlopsProfiler(engine.module, recompute_fwd_factor=section["recompute_fwd_factor"])
        self.profiler.start_profile()
        try:
            yield
        finally:
            self.profiler.stop_profile()
            keys = ("module_depth", "top_modules", "detailed", "output_file")
            options = {key: section[key] for key in keys}
            if self._speaks:
                self.profiler.print_model_profile(profile_step=engine.global_steps, **options)
            self.profiler.end_profile()

    # ---------------------------------------------------------------- steps

    def stepped(self, engine: Watched) -> None:
        """After every optimizer step."""
        if self.times_phases:
            self._take_times(engine)
        if self.monitor.writers:
            self.monitor.write_events(self._events(engine))
        if self.calls is not None and self._config.comms_logger.verbose:
            self._log_calls(self.calls)
        if self._every and self._speaks and engine.global_steps % self._every == 0:
            logger.info(
                "step=%d, skipped=%d, lr=%s, mom=%s",
                engine.global_steps,
                engine.skipped_steps,
                engine.get_lr(),
                momentum_of(engine.basic_optimizer),
            )
        if self._memory and self._speaks and engine.global_steps % (self._every or 1) == 0:
            logger.info("memory (MB) | %s", " | ".join(memory_line(engine)))

    def _take_times(self, engine: Watched) -> None:
        """What the phases took since the last step; gather and reduce lie inside the others."""
        now = {name: engine.core.phases()[name][0] for name in _PHASES}
        self.step_seconds = {name: now[name] - self._seconds[name] for name in _PHASES}
        self._seconds = now
        if self._speaks:
            parts = [f"{name}: {self.step_seconds[name] * 1e3:.2f}" for name in _PHASES]
            logger.info("time (ms) | %s | of these %s", " | ".join(parts[:3]), " | ".join(parts[3:]))

    def _events(self, engine: Watched) -> list[Event]:
        x = engine.global_samples
        rates = engine.get_lr()
        events: list[Event] = [("Train/Samples/lr", float(rates[0]), x)] if rates else []
        if self._config.fp16.enabled:
            events.append(("Train/Samples/loss_scale", engine.loss_scaler.loss_scale, x))
        if self.times_phases:
            spent = self.step_seconds
            times = {
                "forward": spent["forward"],
                "backward": spent["backward"],
                "backward_inner": max(0.0, spent["backward"] - spent["reduce"]),
                "backward_allreduce": spent["reduce"],
                "step": spent["step"],
            }
            events += [(f"Train/Samples/elapsed_time_ms_{name}", value * 1e3, x) for name, value in times.items()]
        return events

    def _log_calls(self, record: _core.CallRecord) -> None:
        calls = record.take_calls()
        for call in calls if self._speaks else []:
            label = f" | {call.label}" if self._config.comms_logger.debug else ""
            logger.info(
                "comm op: %s | time (ms): %.3f | msg size: %d B | ranks: %d%s",
                call.op, call.seconds * 1e3, call.bytes, call.ranks, label,
            )  # fmt: skip

    # ---------------------------------------------------------------- collectives

    def call_rows(self, core: _core.Engine, stragglers: bool) -> list[dict[str, Any]]:
        """One row an operation and message size. With `stragglers` collective: time waited for the slowest rank."""
        rows = []
        for total in self.calls.totals() if self.calls is not None else []:
            row: dict[str, Any] = {
                "op": total.op,
                "bytes": total.bytes,
                "ranks": total.ranks,
                "calls": total.calls,
                "total_ms": total.seconds * 1e3,
                "average_ms": total.seconds * 1e3 / total.calls,
                "algbw_gbps": total.algorithm_bandwidth * 8e-9,
                "busbw_gbps": total.bus_bandwidth * 8e-9,
            }
            if stragglers:  # the rank that came last waited least
                row["straggler_ms"] = row["total_ms"] + core.agree_max(-row["total_ms"])
            rows.append(row)
        return rows

    def close(self) -> None:
        self.monitor.close()


def momentum_of(base: torch.optim.Optimizer | None) -> list[Any]:
    """Betas of Adam-likes, else momentum, one per param group."""
    return [] if base is None else [group.get("betas", group.get("momentum", 0.0)) for group in base.param_groups]


def memory_line(engine: Watched) -> list[str]:
    """What the engine holds on this rank, by kind, and what the device has in use."""
    held = engine.core.memory()
    kinds = ("params", "grads", "master", "states", "buckets", "peak_buckets", "shared")
    line = [f"{kind}: {getattr(held, kind) / 2**20:.1f}" for kind in kinds]
    if engine.device.type == "cuda":
        used, peak = torch.cuda.memory_allocated(engine.device), torch.cuda.max_memory_allocated(engine.device)
        line.append(f"device: {used / 2**20:.1f} (peak {peak / 2**20:.1f})")
    return line


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of numbers as text, a column each."""
    if not rows:
        return "(none)"
    head = list(rows[0])
    cells = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(head)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in [head, *cells])
