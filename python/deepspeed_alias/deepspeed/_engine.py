"""The engine of deepspeed.initialize: a module that has a tessera.Engine, and what only old callers expect of the
engine."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tessera.engine.front import put_script
from tessera.errors import UsageError
from tessera.optim.engines import momentum_of
from torch import nn

import tessera
from deepspeed import _groups, _optimizers, _params, _schedules, _tensor_parallel
from deepspeed._config import DeepSpeedConfig, Section, users_dict
from deepspeed._front import Front
from deepspeed._getters import Getters, refusal
from deepspeed._lazy import NotServed
from deepspeed._logging import log_dist_once, warning_once
from deepspeed._timers import SynchronizedWallClockTimer, ThroughputTimer
from tessera import _core


def _counter(name: str) -> Any:
    """A counter of the engine that callers assign, too."""

    def put(self: DeepSpeedEngine, value: int) -> None:
        counters = {key: getattr(self, key) for key in ("micro_steps", "global_steps", "skipped_steps")} | {name: value}
        self.core.set_counters(**counters, global_samples=self.global_samples)

    return property(lambda self: getattr(self._engine, name), put)


def _without_missing_ok(method: Any) -> inspect.Signature:
    """A folder without a checkpoint is no error of the alias."""
    own = inspect.signature(method)
    return own.replace(parameters=[one for name, one in own.parameters.items() if name != "missing_ok"])


class DeepSpeedEngine(nn.Module):
    """Has a tessera.Engine. A name that is missing here is looked up in what the engine is asked about its
    configuration, then in that engine, if it is public, then in the module; what the engine has is also assigned there.
    The submodule is the user's."""

    _made_of: Any = tessera.Engine
    _engine: tessera.Engine
    _config: Any  # DeepSpeed's name, which programs read

    def __init__(self, model: nn.Module, config: Any, *, given: Any = None, **kwargs: Any) -> None:
        """Takes tessera.Engine's arguments. `given`: the configuration as the user wrote it, where `config` is made of
        it."""
        own = vars(self)
        own["_given"] = users_dict(config if given is None else given)
        own["_front"] = Front()
        _params.settle(model.parameters())
        own["_engine"] = engine = self._made_of(model, config, front=self._front, **kwargs)
        own["_getters"] = Getters(engine.config)
        super().__init__()
        own["_modules"] = engine._modules  # one module, wherever it is exchanged
        own["_config"] = DeepSpeedConfig.of_engine(engine, self._given)
        own["_mpu"] = None
        own["training_data"] = kwargs.get("training_data")
        self._inside_no_sync = False
        self.tput_timer.batch_size = engine.train_batch_size()
        _schedules.shown(engine.lr_scheduler)
        if engine.parallel_plan() is not None:
            _tensor_parallel.mark(model)
            vars(model)["ds_autotp_parsed"] = True
        if self.zero_optimization_stage() == 3:
            _params.adopt(model.parameters())
            # Only the root has this, where TRL asks for it: parameters that modules use of others are found while they
            # run.
            engine.lend(model, "ds_external_parameters", list)

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        if "_engine" not in own or (name.startswith("__") and name.endswith("__")):
            return super().__getattr__(name)
        with contextlib.suppress(AttributeError):
            return super().__getattr__(name)
        module = self.module
        for part in (module,) if name.startswith("_") else (own["_getters"], own["_engine"], module):
            with contextlib.suppress(AttributeError):
                return getattr(part, name)
        refused = refusal(name)
        if refused is not None:
            raise NotServed(refused)
        raise AttributeError(
            f"neither '{type(self).__name__}' nor its module '{type(module).__name__}' has an attribute '{name}'"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        engine = vars(self).get("_engine")
        mine = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        if engine is None or mine or not (name in vars(engine) or hasattr(type(engine), name)):
            super().__setattr__(name, value)
        else:
            setattr(engine, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._getters), *dir(self._engine)})

    def __del__(self) -> None:
        if "_engine" in vars(self) and not sys.is_finalizing():
            self._forget()

    @property
    def tessera_engine(self) -> tessera.Engine:
        """The engine for functions of tessera that take one."""
        return self._engine

    @property
    def training(self) -> bool:
        """The mode: one, whoever changes it."""
        return self._engine.training

    @training.setter
    def training(self, mode: bool) -> None:
        self._engine.training = mode

    # ---- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._front.settle(self._engine)
        self.tput_timer.start()
        return self._engine.forward(*args, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **_: Any
    ) -> torch.Tensor:
        return self._engine.backward(loss, retain_graph, scale_wrt_gas)

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = False,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A loader, as tessera.Engine.data_loader() makes it."""
        return self._engine.data_loader(
            dataset, batch_size, route, pin_memory, data_sampler, collate_fn, num_local_io_workers
        )

    @property
    def num_local_io_workers(self) -> int:
        return self._engine.num_workers

    @num_local_io_workers.setter
    def num_local_io_workers(self, number: int) -> None:
        self._engine.num_workers = number

    def load_module_state_dict(
        self,
        checkpoint: dict[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[[dict[str, Any], nn.Module], None] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """That of tessera.Engine, which gathers parameters where it must, whatever `fetch_z3_params` says."""
        self._engine.load_module_state_dict(checkpoint, strict, custom_load_fn)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.zero_grad(set_to_none)

    @property
    def tput_timer(self) -> ThroughputTimer:
        return self._front.throughput

    @property
    def timers(self) -> SynchronizedWallClockTimer:
        return self._front.timers

    @property
    def gradient_average(self) -> bool:
        """Gradients are the mean over data-parallel ranks; set to False at stage 0, step() updates by their sum."""
        return self._front.averages and self._engine.config.gradient_allreduce_op == "mean"

    @gradient_average.setter
    def gradient_average(self, averages: bool) -> None:
        if averages == self.gradient_average:
            return
        if self.zero_optimization_stage() > 0 or self._engine.config.gradient_allreduce_op != "mean":
            raise NotServed(
                "[engine.gradient_average] is changed at stage 0 only; set gradient_allreduce_op in the configuration"
            )
        self._front.averages = averages

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
            with self._engine.no_sync():
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
        with self._engine.coalesce_grad_reduction():
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
        return self._engine.communication_data_type

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
        self._engine.end_interrupted_calls()

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
        """The value given, else what DeepSpeed resolves: true at stage 3. (Here every stage that can overlap does.)"""
        return self._config.zero_config.overlap_comm

    def _get_zero_param_shapes(self) -> list[dict[str, torch.Size]]:
        """Names and shapes of what each param group trains."""
        specs = self.core.params()
        return [
            {spec.name: _params._whole_shape(spec.tensor) for spec in specs if spec.group == group}
            for group in range(len(self.core.groups()))
        ]

    def save_checkpoint(self, save_dir: str | os.PathLike[str], *args: Any, **kwargs: Any) -> bool:
        """Saves as tessera.Engine does, and with ZeRO the program zero_to_fp32.py beside the tags."""
        self._say_layout()
        saved = self._engine.save_checkpoint(save_dir, *args, **kwargs)
        if self.zero_optimization():
            if self.global_rank == 0:
                put_script(os.fspath(save_dir), os.path.join(save_dir, f".zero_to_fp32-{os.getpid()}"))
            self.core.agree_max(0.0)  # the program is there when any rank returns
        return saved

    def _say_layout(self) -> None:
        """Warns, with the first checkpoint of this process, where the configuration does not say which files it has."""
        if self.global_rank == 0 and "format" not in (self._given.get("checkpoint") or {}):
            warning_once(
                "[engine.save_checkpoint] checkpoints have Tessera's layout: any world and stage loads it, and "
                'zero_to_fp32.py reads it; with "checkpoint": {"format": "deepspeed"} they have the files of DeepSpeed'
                " (mp_rank_*_model_states.pt and the like)"
            )

    save_checkpoint.__signature__ = inspect.signature(tessera.Engine.save_checkpoint)  # type: ignore[attr-defined]

    def save_fp16_model(self, *args: Any, **kwargs: Any) -> bool:
        """save_16bit_model() by its old name."""
        return self._engine.save_16bit_model(*args, **kwargs)

    def load_checkpoint(self, *args: Any, trusted: bool | None = None, **kwargs: Any) -> Any:
        """Loads as tessera.Engine does; the client_state may hold any objects, as DeepSpeed's does: load what you
        trust."""
        if trusted is None:
            log_dist_once(
                "[engine.load_checkpoint] objects in a checkpoint are unpickled, as DeepSpeed does it, which can run "
                "code: load files that you trust, with trusted=True, or refuse objects with trusted=False",
                [0],
                logging.WARNING,
            )
        found = self._engine.load_checkpoint(*args, trusted=trusted is not False, missing_ok=True, **kwargs)
        if found[0] is None:
            folder = os.fspath(args[0] if args else kwargs["load_dir"])
            warnings.warn(
                f"[engine.load_checkpoint] there is no file 'latest' in '{folder}', nothing is loaded", stacklevel=2
            )
        return found

    load_checkpoint.__signature__ = _without_missing_ok(tessera.Engine.load_checkpoint)  # type: ignore[attr-defined]

    def destroy(self) -> None:
        self._forget()
        self._engine.destroy()

    def _forget(self) -> None:
        _params.disown(self.module.parameters())
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
        self._engine.compile(backend, compile_kwargs)

    # ---- the world, configuration

    def _groups(self) -> list[dict[str, Any]]:
        base = self._engine.basic_optimizer
        return [] if base is None else base.param_groups

    def get_type(self) -> list[Any]:
        return [group.get("type", 0.0) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        return momentum_of(self._groups())

    def get_global_grad_norm(self) -> float | None:
        return self._engine.global_grad_norm()

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch, micro batch, accumulation steps)."""
        engine = self._engine
        micro_batch, steps = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
        return engine.train_batch_size(), micro_batch, steps

    def optimizer_name(self) -> str | None:
        """The configured type, or the class of the client's optimizer."""
        if self._engine.client_optimizer is not None and self._engine.basic_optimizer is not None:
            return type(self._engine.basic_optimizer).__name__
        return self._engine.config.optimizer.type or None

    def scheduler_name(self) -> str | None:
        if self._engine.client_lr_scheduler is not None:
            return type(self._engine.lr_scheduler).__name__
        return self._engine.config.scheduler.type or None

    def autotp_size(self) -> int:
        """Ranks that the engine cuts its model over; else what tensor_parallel.autotp_size says, 0 or 1."""
        cut = self._engine.parallel_plan() is not None
        return self.mp_world_size if cut else self._engine.config.tensor_parallel.autotp_size

    @property
    def mp_world_size(self) -> int:
        return self._engine.tp_world_size

    def get_data_parallel_rank(self) -> int:
        return self._engine.dp_rank

    def get_sequence_parallel_rank(self) -> int:
        return self._engine.sp_rank

    def get_model_parallel_rank(self) -> int:
        return self._engine.tp_rank

    get_tensor_parallel_rank = get_model_parallel_rank

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as the user has written it: the dict that was given, or what the file or text holds."""
        return self._given

    def tensor_parallel_config(self) -> Section:
        return Section._of(self._engine.config.to_dict()["tensor_parallel"], {})

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
        named = self.module.named_modules() if self.sparse_gradients_enabled() else ()
        return {f"{name}.weight" for name, m in named if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse}

    def is_first_weights_partition_group(self) -> bool:
        """Whether this rank is of the first group that a whole copy of the parameters is partitioned over."""
        ranks = self._engine.config.zero_optimization.mics_shard_size
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
