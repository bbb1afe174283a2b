"""What an engine tells about its configuration, its place in the world and its progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from tessera import _core
from tessera._config import dtype_at
from tessera._mesh import OwnGroups
from tessera.engine._parallel import TensorParallel
from tessera.engine._report import logger
from tessera.engine._watch import Watch, table
from tessera.errors import ConfigError, UsageError
from tessera.flops import FlopsProfiler
from tessera.monitor import Monitor
from tessera.optim._runners import Runner
from tessera.parallel import ParallelPlan
from tessera.recompute import Recompute

T = TypeVar("T")


def _key(path: str, _kind: type[T]) -> Callable[[EngineGetters], T]:
    """A method that returns what the configuration has under `path`."""

    def get(self: EngineGetters) -> T:
        return self._settings.get(path)

    get.__doc__ = f"`{path}` of the configuration."
    return get


class EngineGetters(nn.Module):
    """The state of an Engine and its read-only surface."""

    module: nn.Module
    _settings: _core.Config
    optimizer: torch.optim.Optimizer | None
    basic_optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    client_optimizer: Any
    client_lr_scheduler: Any
    training_dataloader: Any
    device: torch.device
    local_rank: int
    core: _core.Engine  # the compiled engine
    _runner: Runner | None
    _dp_rank: int
    _dp_size: int
    _world: tuple[int, int]
    _mesh: _core.Mesh
    _own_groups: OwnGroups
    _parallel: TensorParallel
    _watch: Watch

    # ---- batch
    def train_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.dp_world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.core.options().micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        return self.core.options().gradient_accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch, micro batch, accumulation steps)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the accumulation steps so that a step takes this many samples. ConfigError when it cannot."""
        micro_batch = self.train_micro_batch_size_per_gpu()
        samples = micro_batch * self.dp_world_size
        if train_batch_size <= 0 or train_batch_size % samples:
            raise ConfigError(
                f"[engine.set_train_batch_size] {train_batch_size} is not divisible by micro batch * ranks = "
                f"{micro_batch} * {self.dp_world_size} = {samples}"
            )
        self.core.set_gradient_accumulation_steps(train_batch_size // samples)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the micro batch; the train batch follows, the accumulation steps stay."""
        if micro_batch_size <= 0:
            raise ConfigError(f"[engine.set_train_micro_batch_size] must be positive, got {micro_batch_size}")
        self.core.set_micro_batch_size(micro_batch_size)

    # ---- progress
    @property
    def micro_steps(self) -> int:
        return self.core.micro_steps()

    @property
    def global_steps(self) -> int:
        return self.core.global_steps()

    @property
    def skipped_steps(self) -> int:
        return self.core.skipped_steps()

    @property
    def global_samples(self) -> int:
        """Of all ranks, in the optimizer steps so far."""
        return self.core.global_samples()

    @global_samples.setter
    def global_samples(self, samples: int) -> None:
        self.core.set_counters(self.micro_steps, self.global_steps, self.skipped_steps, samples)

    def was_step_applied(self) -> bool:
        """True when the last step() updated parameters."""
        return self.core.was_step_applied()

    def get_global_grad_norm(self) -> float | None:
        """Global L2 norm before clipping of the last applied step; None before the first."""
        return self.core.global_grad_norm()

    # ---- forward
    def recompute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """function(*args, **kwargs), whose backward computes again what it needs; inputs are kept as the section
        `activation_checkpointing` says. With partition_activations, inputs that are alike on the tensor-parallel ranks
        are kept in slices there, and the backward is collective over them; with tessera.sequence_parallel_norms they
        are parts already."""
        section = "activation_checkpointing"
        alike = self.mp_world_size > 1 and not self._parallel.cuts_sequence
        cuts = alike and self._settings.get(f"{section}.partition_activations")
        call = Recompute(
            offload=self._settings.get(f"{section}.cpu_checkpointing"),
            slices=self._mesh.group(_core.Axis.Tp) if cuts else None,
            synchronize=self._settings.get(f"{section}.synchronize_checkpoint_boundary"),
            named=self._settings.get(f"{section}.profile"),
        )
        return call(function, *args, **kwargs)

    # ---- what it watches
    @property
    def monitor(self) -> Monitor:
        """The writers of events; write_events([(name, value, x)]) adds events of your own."""
        return self._watch.monitor

    @property
    def flops_profiler(self) -> FlopsProfiler | None:
        """The profile that the section `flops_profiler` asked for, once it was taken."""
        return self._watch.profiler

    def phase_seconds(self) -> dict[str, float]:
        """What this rank spent since the engine was built in forward, backward and step, and of these in gather
        (partitioned parameters) and reduce (gradients). Host time; with wall_clock_breakdown that of the device too."""
        return {name: seconds for name, (seconds, _) in self.core.phases().items()}

    def comm_summary(self, show_straggler: bool = False) -> list[dict[str, Any]]:
        """Logs and returns what this engine's collectives took on this rank, a row for each operation and message size:
        bytes, ranks, calls, milliseconds, Gbit/s of the message (algbw) and over a rank's link (busbw). With
        `show_straggler` also the part of the time that this rank waited for the last one; collective then. UsageError
        without comms_logger.enabled."""
        if self._watch.calls is None:
            raise UsageError("[engine.comm_summary] collectives are not timed: set comms_logger.enabled to true")
        rows = self._watch.call_rows(self.core, show_straggler)
        if self.global_rank == 0:
            logger.info("collectives\n%s", table(rows))
        return rows

    # ---- optimizer
    def _of_groups(self, name: str) -> list[Any]:
        groups = [] if self.basic_optimizer is None else self.basic_optimizer.param_groups
        return [group.get(name, 0.0) for group in groups]

    def get_lr(self) -> list[Any]:
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Betas of Adam-likes, else momentum, one per param group."""
        groups = [] if self.basic_optimizer is None else self.basic_optimizer.param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def get_type(self) -> list[Any]:
        return self._of_groups("type")

    def optimizer_name(self) -> str | None:
        """The configured type, or the class of the client's optimizer."""
        if self.client_optimizer is not None and self.basic_optimizer is not None:
            return type(self.basic_optimizer).__name__
        return self._settings.get("optimizer.type") or None

    def scheduler_name(self) -> str | None:
        if self.client_lr_scheduler is not None:
            return type(self.lr_scheduler).__name__
        return self._settings.get("scheduler.type") or None

    # ---- the world
    @property
    def world_size(self) -> int:
        """All processes of the job; dp_world_size counts those that share this model's batch."""
        return self._world[1]

    @property
    def global_rank(self) -> int:
        return self._world[0]

    @property
    def dp_world_size(self) -> int:
        return self._dp_size

    @property
    def seq_dp_world_size(self) -> int:
        """Ranks that exchange gradients: data-parallel times sequence-parallel ones."""
        return self._dp_size * self.sp_world_size

    @property
    def sp_world_size(self) -> int:
        """Ranks that share a sequence."""
        return self._mesh.size(_core.Axis.Sp)

    @property
    def mp_world_size(self) -> int:
        """Ranks that hold slices of one model."""
        return self._mesh.size(_core.Axis.Tp)

    def process_group(self, axis: str) -> Any:
        """The group of torch.distributed along an axis ("dp_replicate", "dp_shard", "sp", "tp"); None where there is
        none: one rank along it, or groups that are not torch's."""
        return self._own_groups.along.get(axis)

    def get_data_parallel_rank(self) -> int:
        return self._dp_rank

    def get_sequence_parallel_rank(self) -> int:
        return self._mesh.rank(_core.Axis.Sp)

    def get_model_parallel_rank(self) -> int:
        return self._mesh.rank(_core.Axis.Tp)

    get_tensor_parallel_rank = get_model_parallel_rank

    def autotp_size(self) -> int:
        """Ranks that the engine cuts its model over; else what tensor_parallel.autotp_size says, 0 or 1."""
        cut = self._parallel.plan is not None
        return self.mp_world_size if cut else self._settings.get("tensor_parallel.autotp_size")

    def parallel_plan(self) -> ParallelPlan | None:
        """How the model is cut over the tensor-parallel ranks, and why; print() it. None for a whole model."""
        return self._parallel.plan

    # ---- configuration
    @property
    def config(self) -> _core.Config:
        """The configuration, resolved: config.get("zero_optimization.stage")."""
        return self._settings

    zero_optimization_stage = _key("zero_optimization.stage", int)
    zero_allow_untested_optimizer = _key("zero_allow_untested_optimizer", bool)
    zero_reduce_scatter = _key("zero_optimization.reduce_scatter", bool)
    zero_reduce_bucket_size = _key("zero_optimization.reduce_bucket_size", int)
    zero_allgather_bucket_size = _key("zero_optimization.allgather_bucket_size", int)
    zero_contiguous_gradients = _key("zero_optimization.contiguous_gradients", bool)
    zero_load_from_fp32_weights = _key("zero_optimization.load_from_fp32_weights", bool)
    zero_ignore_unused_parameters = _key("zero_optimization.ignore_unused_parameters", bool)
    zero_gather_16bit_weights_on_model_save = _key("zero_optimization.stage3_gather_16bit_weights_on_model_save", bool)
    fp16_enabled = _key("fp16.enabled", bool)
    bfloat16_enabled = _key("bf16.enabled", bool)
    torch_autocast_enabled = _key("torch_autocast.enabled", bool)
    managed_gradient_accumulation = _key("managed_gradient_accumulation", bool)
    gradient_clipping = _key("gradient_clipping", float)
    loss_scale = _key("fp16.loss_scale", float)  # static; 0 means dynamic. The present one: loss_scaler.loss_scale
    wall_clock_breakdown = _key("wall_clock_breakdown", bool)

    def zero_optimization(self) -> bool:
        return self._settings.placements.shards_states

    def steps_per_print(self) -> int | None:
        return self._settings.get("steps_per_print")

    def zero_overlap_comm(self) -> bool:
        return self.core.options().zero.overlap

    def torch_autocast_dtype(self) -> torch.dtype | None:
        return dtype_at(self._settings, "torch_autocast.dtype")

    def dynamic_loss_scale(self) -> bool:
        return self.fp16_enabled() and self.loss_scale() == 0

    @property
    def communication_data_type(self) -> torch.dtype:
        """dtype of the gradients that travel."""
        key = "seq_parallel_communication_data_type" if self.sp_world_size > 1 else "communication_data_type"
        return dtype_at(self._settings, key) or self.core.options().zero.precision.grad
