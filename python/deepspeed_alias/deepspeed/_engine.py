"""The engine of deepspeed.initialize: tessera.Engine, and what only old callers expect of it."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from tessera._deepspeed import put_script
from tessera.errors import UsageError
from torch import nn

import tessera
from deepspeed import _groups, _optimizers, _params, _schedules, _tensor_parallel
from deepspeed._config import DeepSpeedConfig, Section, users_dict
from deepspeed._getters import ConfigGetters, refusal
from deepspeed._lazy import NotServed
from deepspeed._logging import log_dist_once, warning_once
from deepspeed._timers import SynchronizedWallClockTimer, ThroughputTimer
from deepspeed._zero import DeepSpeedZeRoOffload
from tessera import _core


def _counter(name: str) -> Any:
    """A counter of the engine that callers assign, too."""

    def put(self: tessera.Engine, value: int) -> None:
        counters = {key: getattr(self, key) for key in ("micro_steps", "global_steps", "skipped_steps")} | {name: value}
        self.core.set_counters(**counters, global_samples=self.global_samples)

    return property(getattr(tessera.Engine, name).fget, put)


class DeepSpeedEngine(ConfigGetters, tessera.Engine):
    """tessera.Engine with DeepSpeed's attributes. Names that it does not have are looked up in the module."""

    def __init__(self, model: nn.Module, config: Any, *, given: Any = None, **kwargs: Any) -> None:
        """`given`: the configuration as the user wrote it, where `config` is made of it."""
        vars(self)["_given"] = users_dict(config if given is None else given)
        _params.settle(model.parameters())
        super().__init__(model, config, **kwargs)
        self._config = DeepSpeedConfig(self._settings, world_size=self.dp_world_size)
        _schedules.shown(self.lr_scheduler)
        self._averages = True
        self.training_data = kwargs.get("training_data")
        self._parameter_offload: DeepSpeedZeRoOffload | None = None
        self._inside_no_sync = False
        self._mpu: Any = None
        self.tput_timer = ThroughputTimer(self.train_batch_size)
        self.timers = SynchronizedWallClockTimer()
        if self._parallel.cuts_params:
            _tensor_parallel.mark(self.module)
            vars(self.module)["ds_autotp_parsed"] = True
        if self.zero_optimization_stage() == 3:
            _params.adopt(self.module.parameters())
            # Of the root only, where TRL asks for it: what modules use of others is found out while they run.
            self._loans.put(self.module, "ds_external_parameters", list)
            self._loans.keep_off_copies(self.module)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name in _OWN or (name.startswith("__") and name.endswith("__")):
                raise
        try:
            return getattr(module, name)
        except AttributeError:
            refused = refusal(name)
            if refused is not None:
                raise NotServed(refused) from None
            raise AttributeError(
                f"neither '{type(self).__name__}' nor its module '{type(module).__name__}' has an attribute '{name}'"
            ) from None

    def _build_optimizer(self, model_parameters: Any) -> torch.optim.Optimizer | None:
        built = super()._build_optimizer(model_parameters)
        return built if built is None else _optimizers.checked(self, built)

    def _visible_optimizer(self, options: Any) -> torch.optim.Optimizer | None:
        found = super()._visible_optimizer(options)
        if isinstance(found, tessera.Optimizer):
            assert self._updates.runner is not None
            return _optimizers.class_for(self)(self, self._updates.runner)
        return found

    # ---- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _params.settle_engine(self)
        self.tput_timer.start()
        return super().forward(*args, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **_: Any
    ) -> torch.Tensor:
        return super().backward(loss, retain_graph, scale_wrt_gas)

    def step(self, lr_kwargs: dict[str, Any] | None = None, *, global_norm: float | None = None) -> None:
        _params.settle_engine(self)
        steps = self.global_steps
        sums = not self._averages and self.is_gradient_accumulation_boundary()
        if sums:
            self.core.grad_norm()  # they have come
            self._times(self.seq_dp_world_size)
        try:
            super().step(lr_kwargs, global_norm=global_norm)
        except Exception:
            if sums and self.global_steps == steps:  # step() may be called again
                self._times(1 / self.seq_dp_world_size)
            raise
        if self.wall_clock_breakdown() and self.global_steps != steps:
            self.timers.take(self._watch.step_seconds)
        self.tput_timer.stop(global_step=self.global_steps != steps)

    def _join(self) -> None:
        _params.settle_engine(self)
        super()._join()

    def _whole(self) -> Any:
        _params.settle_engine(self)
        return super()._whole()

    @property
    def gradient_average(self) -> bool:
        """Gradients are the mean over data-parallel ranks; set to False at stage 0, step() updates by their sum."""
        return self._averages and self._settings.get("gradient_allreduce_op") == "mean"

    @gradient_average.setter
    def gradient_average(self, averages: bool) -> None:
        if averages == self.gradient_average:
            return
        if self.zero_optimization_stage() > 0 or self._settings.get("gradient_allreduce_op") != "mean":
            raise NotServed(
                "[engine.gradient_average] is changed at stage 0 only; set gradient_allreduce_op in the configuration"
            )
        self._averages = averages

    def _times(self, factor: float) -> None:
        """All gradients that are there."""
        for number in self._updates.optimized:
            view = self.core.local_view(number, _core.Quantity.Gradient)
            if view is not None:
                view.detach().mul_(factor)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Stages 0 and 1 only, as in DeepSpeed. (tessera.Engine has it at every stage.)"""
        stage = self.zero_optimization_stage()
        if self._inside_no_sync:
            raise UsageError("[engine.no_sync] no_sync context manager reentry is unsupported")
        if stage >= 2:
            raise UsageError(
                "[engine.no_sync] no_sync context manager is incompatible with gradient partitioning logic of ZeRO "
                f"stage {stage}"
            )
        self._inside_no_sync = True
        try:
            with super().no_sync():
                yield
        finally:
            self._inside_no_sync = False

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """ZeRO only, as in DeepSpeed. (tessera.Engine has it at every stage.)"""
        if not self.zero_optimization():
            raise NotImplementedError(
                "[engine.coalesce_grad_reduction] requires ZeRO stage 1, 2 or 3: at stage 0 there is no reduction but "
                "that of the boundary, whatever the optimizer wrapper"
            )
        with super().coalesce_grad_reduction():
            yield

    def _backward_epilogue(self) -> None:
        """Gradients of a backward past engine.backward() are complete when it returns."""

    @property
    def _is_gradient_accumulation_boundary(self) -> bool:
        return self.is_gradient_accumulation_boundary()

    @property
    def _global_grad_norm(self) -> float | None:
        return self.get_global_grad_norm()

    micro_steps, global_steps, skipped_steps = map(_counter, ("micro_steps", "global_steps", "skipped_steps"))

    @property
    def communication_data_type(self) -> torch.dtype:
        return super().communication_data_type

    @communication_data_type.setter
    def communication_data_type(self, dtype: torch.dtype) -> None:
        if dtype != self.communication_data_type:
            raise NotServed(
                "[engine.communication_data_type] is fixed when the engine is built; set the key "
                "communication_data_type of its configuration"
            )

    # ---- weights

    def empty_partition_cache(self) -> None:
        """Ends module calls that an exception left open. Nothing else stays whole between two modules, but for the
        small parameters that are never partitioned (stage3_param_persistence_threshold)."""
        self._partition.end_stray()

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The whole state dict on rank 0, None on others. Collective."""
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        return state if self.global_rank == 0 else None

    def allreduce_gradients(self, bucket_size: int = _optimizers.MEMORY_OPT_ALLREDUCE_SIZE) -> None:
        """The backward reduces them; at a boundary they have come when this returns, which is collective then."""
        if self.is_gradient_accumulation_boundary():
            self.core.grad_norm()

    def zero_overlap_comm(self) -> bool:
        """As given, else what DeepSpeed resolves: true at stage 3. (Here it is done at every stage that can.)"""
        return self._config.zero_config.overlap_comm  # type: ignore[attr-defined]

    def _get_zero_param_shapes(self) -> list[dict[str, torch.Size]]:
        """Of each param group the names and shapes of what it trains."""
        specs = self.core.params()
        return [
            {spec.name: _params._whole_shape(spec.tensor) for spec in specs if spec.group == group}
            for group in range(len(self.core.groups()))
        ]

    def save_checkpoint(self, save_dir: str | os.PathLike[str], *args: Any, **kwargs: Any) -> bool:
        """As tessera.Engine's, and with ZeRO the program zero_to_fp32.py beside the tags."""
        self._say_layout()
        saved = super().save_checkpoint(save_dir, *args, **kwargs)
        if self.zero_optimization():
            if self.global_rank == 0:
                put_script(os.fspath(save_dir), os.path.join(save_dir, f".zero_to_fp32-{os.getpid()}"))
            self.core.agree_max(0.0)  # it is there when any rank returns
        return saved

    def _say_layout(self) -> None:
        """With the first checkpoint of this process, where the configuration does not say which files it has."""
        if self._telling_rank() == 0 and "checkpoint.format" not in self._settings.given:
            warning_once(
                "[engine.save_checkpoint] checkpoints have Tessera's layout: any world and stage loads it, and "
                'zero_to_fp32.py reads it; with "checkpoint": {"format": "deepspeed"} they have the files of DeepSpeed'
                " (mp_rank_*_model_states.pt and the like)"
            )

    save_checkpoint.__signature__ = inspect.signature(tessera.Engine.save_checkpoint)  # type: ignore[attr-defined]

    def load_checkpoint(self, *args: Any, trusted: bool | None = None, **kwargs: Any) -> Any:
        """As tessera.Engine's; the client_state may hold any objects, as DeepSpeed's does: load what you trust."""
        if trusted is None:
            log_dist_once(
                "[engine.load_checkpoint] objects in a checkpoint are unpickled, as DeepSpeed does it, which can run "
                "code: load files that you trust, with trusted=True, or refuse objects with trusted=False",
                [0],
                logging.WARNING,
            )
        return super().load_checkpoint(*args, trusted=trusted is not False, **kwargs)

    load_checkpoint.__signature__ = inspect.signature(tessera.Engine.load_checkpoint)  # type: ignore[attr-defined]

    def destroy(self) -> None:
        if "module" in self.__dict__.get("_modules", {}):
            _params.disown(self.module.parameters())
        super().destroy()
        _groups.forget(self)

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        if schedule is not None or compiled_autograd_enabled:
            raise NotImplementedError(
                "[engine.compile] schedule and compiled_autograd_enabled belong to DeepCompile (section `compile`), "
                "which Tessera does not serve"
            )
        super().compile(backend, compile_kwargs)

    # ---- the world, configuration

    @property
    def config(self) -> dict[str, Any]:  # type: ignore[override]
        """What the user has written: the dict that was given, or what the file or text holds."""
        return self._given

    def tensor_parallel_config(self) -> Section:
        return Section._of(self._settings.get("tensor_parallel"), {})

    @property
    def mpu(self) -> Any:
        return self._mpu

    @property
    def sequence_parallel_size(self) -> int:
        return self.sp_world_size

    @property
    def param_names(self) -> dict[nn.Parameter, str]:
        return {param: name for name, param in self.module.named_parameters()}

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Embeddings whose gradients are sparse, where `sparse_gradients` asks for them."""
        named = self.module.named_modules() if self._settings.get("sparse_gradients") else ()
        return {f"{name}.weight" for name, m in named if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse}

    def is_first_weights_partition_group(self) -> bool:
        """This rank is of the first group that a whole copy of the parameters is partitioned over."""
        ranks = self._settings.get("zero_optimization.mics_shard_size")
        return self.global_rank < ranks if ranks > 0 else self.zero_optimization_partition_weights()

    @property
    def data_parallel_group(self) -> Any:
        return _groups.group_of(self, _core.Axis.DpShard, "get_data_parallel_group", self._mpu)

    @property
    def seq_parallel_group(self) -> Any:
        return _groups.group_of(self, _core.Axis.Sp, "get_sequence_parallel_group", self._mpu)

    def get_sequence_parallel_group(self) -> Any:
        return self.seq_parallel_group

    def get_wall_clock_timers(self) -> SynchronizedWallClockTimer:
        return self.timers

    def zero_offload_optimizer(self) -> Any:
        return getattr(self._config.zero_config, "offload_optimizer", None)

    def zero_offload_param(self) -> Any:
        return getattr(self._config.zero_config, "offload_param", None)


# What the engine's class asks itself for before it is set: never the module's.
_OWN = frozenset(name for name in tessera.Engine.__annotations__ if name.startswith("_")) | {"core", "basic_optimizer"}
