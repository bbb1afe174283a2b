"""The getters of an engine: its configuration, its optimizer and its progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

import torch

from tessera import _core
from tessera.engine._ranks import Ranks
from tessera.engine._report import logger
from tessera.engine._watch import Watch
from tessera.errors import ConfigError
from tessera.flops import FlopsProfiler
from tessera.monitor import Monitor
from tessera.parallel import ParallelPlan
from tessera.parallel.engines import TensorParallel
from tessera.recompute import Recompute

P = ParamSpec("P")
T = TypeVar("T")


class Watched(Protocol):
    """The part of an engine that Info shows."""

    @property
    def core(self) -> _core.Engine: ...
    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None: ...
    @property
    def _settings(self) -> _core.Config: ...
    @property
    def _ranks(self) -> Ranks: ...
    @property
    def _parallel(self) -> TensorParallel: ...
    @property
    def _watch(self) -> Watch: ...


class Info:
    def __init__(self, engine: Watched) -> None:
        self._engine = engine

    # ---- progress
    @property
    def micro_steps(self) -> int:
        """Calls of step() so far."""
        return self._engine.core.micro_steps()

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, skipped ones too."""
        return self._engine.core.global_steps()

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps without an update: inf or NaN in a gradient."""
        return self._engine.core.skipped_steps()

    def was_step_applied(self) -> bool:
        """True when the last step() updated parameters."""
        return self._engine.core.was_step_applied()

    def global_grad_norm(self) -> float | None:
        """Global L2 norm before clipping of the last applied step; None before the first."""
        return self._engine.core.global_grad_norm()

    # ---- batch
    def train_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks."""
        ranks = self._engine._ranks.dp_world_size
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * ranks

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one forward of a data-parallel rank."""
        return self._engine.core.options().micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an optimizer step."""
        return self._engine.core.options().gradient_accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the accumulation steps so that a step takes this many samples. ConfigError when it cannot."""
        micro_batch, ranks = self.train_micro_batch_size_per_gpu(), self._engine._ranks.dp_world_size
        samples = micro_batch * ranks
        if train_batch_size <= 0 or train_batch_size % samples:
            raise ConfigError(
                f"[engine.set_train_batch_size] {train_batch_size} is not divisible by micro batch * ranks = "
                f"{micro_batch} * {ranks} = {samples}"
            )
        self._engine.core.set_gradient_accumulation_steps(train_batch_size // samples)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the micro batch; the train batch follows, the accumulation steps stay."""
        self._engine.core.set_micro_batch_size(micro_batch_size)

    # ---- forward
    def recompute(self, /, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns function(*args, **kwargs), whose backward computes again what it needs; inputs are kept as the
        section `activation_checkpointing` says. With partition_activations, inputs that are alike on the
        tensor-parallel ranks are kept in slices there, and the backward is collective over them; with
        tessera.sequence_parallel_norms they are parts already."""
        section, ranks = self._engine._settings.activation_checkpointing, self._engine._ranks
        alike = ranks.tp_world_size > 1 and not self._engine._parallel.cuts_sequence
        cuts = alike and section.partition_activations
        call = Recompute(
            offload=section.cpu_checkpointing,
            slices=ranks.mesh.group(_core.Axis.Tp) if cuts else None,
            synchronize=section.synchronize_checkpoint_boundary,
            named=section.profile,
        )
        return call(function, *args, **kwargs)

    # ---- what it watches
    @property
    def monitor(self) -> Monitor:
        """The writers of events; write_events([(name, value, x)]) adds events of your own."""
        return self._engine._watch.monitor

    @property
    def flops_profiler(self) -> FlopsProfiler | None:
        """The profile that the section `flops_profiler` asked for, once it was taken."""
        return self._engine._watch.profiler

    def expect(self, steps: int = 0, tokens_per_sample: float = 0) -> None:
        """Sets, for the progress line (steps_per_print) and the events, how many optimizer steps there are in all
        (without it the schedule's total_num_steps), and tokens of a sample. 0: not known."""
        self._engine._watch.expect(steps, tokens_per_sample)

    def count_flops(self, per_sample: float | None = None, peak: float | None = None) -> None:
        """Events Train/Samples/tflops, of each rank, and with the `peak` of a device, in operations a second, mfu:
        `per_sample` operations in forward and backward of a sample, over the time from one update to the next. None:
        three times those of the products of matrices, convolutions and attentions in the forwards of the next
        optimizer step, with a warning where there are none; in a pipeline the first stage's, of its ranks. Local."""
        self._engine._watch.count_flops(self._engine.core, per_sample, peak)

    def memory(self) -> _core.MemoryUse:
        """Bytes that the engine holds on this rank, by kind (params, grads, master, states, buckets, peak_buckets;
        of these host and disk), and in `formula` what the memory formula says; printed, a table of both. Local."""
        return self._engine._watch.memory(self._engine.core)

    def phase_seconds(self) -> dict[str, float]:
        """Seconds that this rank spent since the engine was built in forward, backward and step, and of these in gather
        (partitioned parameters) and reduce (gradients). Host time; with wall_clock_breakdown the device's too."""
        return {name: seconds for name, (seconds, _) in self._engine.core.phases().items()}

    @property
    def step_seconds(self) -> dict[str, float]:
        """Such seconds of the last optimizer step; empty without wall_clock_breakdown."""
        return self._engine._watch.step_seconds

    @property
    def timed_calls(self) -> _core.CallRecord | None:
        """This rank's collectives so far: totals() by operation and message size, reset() forgets them. None without
        comms_logger.enabled."""
        return self._engine._watch.calls

    def comm_summary(self, show_straggler: bool = False) -> list[dict[str, str | int | float]]:
        """Logs and returns what this engine's collectives took on this rank, a row for each operation and message size:
        bytes, ranks, calls, milliseconds, Gbit/s of the message (algbw) and over a rank's link (busbw). With
        `show_straggler` also the part of the time that this rank waited for the last one; collective then. UsageError
        without comms_logger.enabled."""
        rows, text = self._engine._watch.call_rows(self._engine.core, show_straggler)
        if self._engine._ranks.global_rank == 0:
            logger.info("collectives\n%s", text)
        return rows

    # ---- optimizer
    def get_lr(self) -> list[float]:
        """The rate of each param group; empty without an optimizer."""
        base = self._engine.basic_optimizer
        return [] if base is None else [float(group.get("lr", 0.0)) for group in base.param_groups]

    # ---- how the model is cut
    def parallel_plan(self) -> ParallelPlan | None:
        """How the model is cut over the tensor-parallel ranks, and why; print() it. None for a whole model."""
        return self._engine._parallel.plan

    # ---- configuration
    def gradient_dtype(self) -> torch.dtype:
        settings = self._engine._settings
        shared = self._engine._ranks.sp_world_size > 1
        dtype = settings.seq_parallel_communication_data_type if shared else settings.communication_data_type
        return dtype or self._engine.core.options().zero.precision.grad
