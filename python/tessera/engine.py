"""Engine: an nn.Module around the user's model. The core does the work; this class converts, orders the calls around
forward, backward and step, and keeps what only Python has (schedules, loaders, the client's objects)."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from tessera import _core, distributed
from tessera.autocast import cast_floating, get_comm_dtype, has_comm_dtype, init_autocast_params, remove_marks
from tessera.builders import build_optimizer, build_schedule, describe, params_of
from tessera.configuration import dtype_at, load_config
from tessera.construction import early_of, taken_over
from tessera.data import Loader, make_loader
from tessera.errors import ConfigError, UsageError
from tessera.getters import EngineGetters
from tessera.leaf import apply_config, leaf_paths, z3_leaf_module
from tessera.loss_scale import LossScaler
from tessera.native import native_rule, read_group
from tessera.optimizer import Optimizer
from tessera.outputs import tensors_in
from tessera.partition import Partition, gathered
from tessera.placement import group_device, place
from tessera.runners import ExternalRunner, NativeRunner, Runner
from tessera.units import ROOT, UnitPolicy, default_unit_policy, outline

logger = logging.getLogger("tessera")


class Engine(EngineGetters):
    """Trains `model` as `config` says. tessera.initialize() builds one from the usual arguments.

    `group`: the data-parallel ranks (a torch ProcessGroup or a group of tessera; default: all processes), or two axes
    of them for hybrid sharding (a DeviceMesh or a mesh of tessera: dp_replicate, dp_shard).
    `unit_policy`: which parameters travel together, see tessera.units.
    Collective: every rank builds its engine at the same time; parameters start with rank 0's values.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Any,
        *,
        optimizer: Any = None,
        model_parameters: Any = None,
        lr_scheduler: Any = None,
        training_data: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        group: Any = None,
        unit_policy: UnitPolicy | None = None,
    ) -> None:
        super().__init__()
        self.config = load_config(config)
        device = group_device(group)
        self._mesh, self._own_groups = distributed.core_mesh(
            group, self.config.get("zero_optimization.mics_shard_size")
        )
        self._dp_rank, self._dp_size = self._mesh.dp_rank(), self._mesh.dp_size()
        self._world = distributed.world_of(self._mesh)
        self.config.resolve_batch(self._dp_size)  # its errors come before anything is touched
        self.device = place(model, device)
        base = build_optimizer(self.config, model, optimizer, model_parameters)
        placements = self.config.placements
        if base is None and placements.shards_states and not placements.shards_params:
            raise ConfigError(
                f"[initialize] zero_optimization.stage {self.config.get('zero_optimization.stage')} requires an "
                "optimizer; pass one or use stage 0"
            )
        _check_materialized(model)
        self.module = model
        self.local_rank = distributed.local_rank()
        self.client_optimizer = optimizer
        self.client_lr_scheduler = lr_scheduler
        self.num_local_io_workers = 0
        self._lent: dict[str, Any] = {}
        self._marked: list[torch.Tensor] = []
        self._build_core(base, unit_policy or default_unit_policy)
        self.collate_fn = collate_fn
        try:
            self.lr_scheduler = build_schedule(self.config, optimizer, base, lr_scheduler)
            self.training_dataloader = None if training_data is None else self.deepspeed_io(training_data)
        except BaseException:
            self.destroy()  # the module and the client's optimizer are their owner's again
            raise

    # ---------------------------------------------------------------- construction

    def _build_core(self, base: torch.optim.Optimizer | None, policy: UnitPolicy) -> None:
        rule = None if base is None else native_rule(base)
        options = _core.engine_options(self.config, self._dp_size)
        options.rule = rule.rule if rule is not None else _core.Rule.External
        if base is not None and rule is None:
            options.client_optimizer = describe(base)
        self._input_dtype = torch.float16 if self.fp16_enabled() and self.config.get("fp16.auto_cast") else None
        if options.autocast.enabled:
            modules = self.config.get("torch_autocast.lower_precision_safe_modules")
            self._marked = init_autocast_params(self.module, options.autocast.dtype, modules)

        units = self._units(policy)
        specs, index = self._specs(base, units, options.autocast.enabled)
        groups = [_core.GroupOptions() for _ in base.param_groups] if base is not None else []
        if base is not None and rule is not None:
            for number, group in enumerate(groups):
                read_group(rule, base, number, group)
        self.core = _core.Engine(options, self._mesh, specs, groups)
        self.core.broadcast_buffers([b for b in self.module.buffers() if b.layout == torch.strided and not b.is_meta])
        taken_over(self.module)
        self._index = {id(spec.tensor): number for number, spec in enumerate(specs)}
        self._optimized = frozenset(index.values())
        self._frozen = {s.name: s.tensor for s in specs if s.group < 0 and not s.tensor.requires_grad}
        leaves = leaf_paths(self.module) if self.config.placements.shards_params else []
        self._partition = Partition(self, self.core, self.module, self._index, set(units.values()), leaves)
        buffer_dtype = dtype_at(self.config, "data_types.buffer_dtype")
        if buffer_dtype is not None:
            _cast_buffers(self.module, buffer_dtype)
        self._runner = self._make_runner(base, rule, index)
        self.basic_optimizer = base
        self.optimizer = self._visible_optimizer(options)

    def _units(self, policy: UnitPolicy) -> dict[str, str]:
        units = policy(self.module)
        if not self.config.placements.shards_params:
            return units
        apply_config(self.module, self.config)
        for module in self.module.modules():
            if z3_leaf_module(module):
                for param in module.parameters():
                    param._z3_leaf = True  # type: ignore[attr-defined]
        return _core.partition_units(outline(self.module), units, leaf_paths(self.module))

    def _specs(
        self, base: torch.optim.Optimizer | None, units: dict[str, str], marked: bool
    ) -> tuple[list[_core.ParamSpec], dict[int, int]]:
        """All parameters, and where the optimized ones are: id(parameter) -> number."""
        group_of: dict[int, int] = {}
        for number, group in enumerate(base.param_groups if base is not None else []):
            group_of.update((id(param), number) for param in group["params"] if param.requires_grad)
        named: list[tuple[str, torch.Tensor]] = list(self.module.named_parameters())
        known = {id(param) for _, param in named}
        strangers = [p for p in params_of(base.param_groups if base is not None else []) if id(p) not in known]
        named += [(f"optimizer.{number}", param) for number, param in enumerate(strangers)]
        specs = [
            _core.ParamSpec(
                name,
                param,
                group_of.get(id(param), -1),
                units.get(name, ROOT),
                *early_of(param),
                comm=get_comm_dtype(param) if marked and has_comm_dtype(param) else None,
            )
            for name, param in named
        ]
        index = {id(spec.tensor): number for number, spec in enumerate(specs) if spec.group >= 0}
        return specs, index

    def _make_runner(self, base: torch.optim.Optimizer | None, rule: Any, index: dict[int, int]) -> Runner | None:
        if base is None:
            return None
        if rule is not None:
            return NativeRunner(self.core, base, rule, index)
        return ExternalRunner(self.core, base, index, on_params=self._params_are_masters())

    def _optimizes(self, param: torch.Tensor) -> bool:
        return self._index.get(id(param)) in self._optimized

    def _params_are_masters(self) -> bool:
        return not self.config.placements.shards_states and self.core.options().zero.precision.master_is_param()

    def _masters(self) -> dict[str, torch.Tensor]:
        """This rank's part of the fp32 masters by name; empty where the parameters are the masters."""
        if self.core.options().zero.precision.master_is_param():
            return {}
        views = {name: self.core.local_view(number, _core.Quantity.Master) for name, number in self._numbers().items()}
        return {name: view for name, view in views.items() if view is not None}

    def _load_masters(self, masters: dict[str, torch.Tensor]) -> None:
        numbers = self._numbers()
        if numbers.keys() != masters.keys():
            names = ", ".join(sorted(numbers.keys() ^ masters.keys()))
            raise ConfigError(f"[optimizer.load_state_dict] the masters are of another model; only one has {names}")
        for name, number in numbers.items():
            self.core.set_local(number, _core.Quantity.Master, masters[name])
        self.core.refresh_params()

    def _numbers(self) -> dict[str, int]:
        """Of what is optimized, in the order of the core."""
        params = self.core.params()
        return {params[number].name: number for number in sorted(self._optimized)}

    def _visible_optimizer(self, options: _core.EngineOptions) -> torch.optim.Optimizer | None:
        """The client's own object where its states can be what it expects (stage 0, fp32), else a wrapper."""
        if self._runner is None:
            return None
        if not self._params_are_masters():
            return Optimizer(self, self._runner)
        base = self._runner.base
        self._lent = {name: base.__dict__.get(name) for name in ("step",)}
        base.step = types.MethodType(_step_of(weakref.ref(self)), base)  # type: ignore[method-assign]
        return base

    # ---------------------------------------------------------------- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        core = self.core
        if self._frozen:
            self._warn_of_thawed()
        if self._input_dtype is not None:
            args, kwargs = cast_floating((args, kwargs), self._input_dtype)
        switched_off = core.pre_forward()
        try:
            if switched_off and self._dp_rank == 0:
                logger.warning(
                    "[engine] forward runs without autocast: its configuration does not enable torch_autocast, so the "
                    "torch.autocast region around it is switched off inside"
                )
            outputs = self.module(*args, **kwargs)
            core.post_forward(tensors_in(outputs))
        except BaseException:
            core.abort_forward()
            raise
        return outputs

    def _warn_of_thawed(self) -> None:
        thawed = [name for name, param in self._frozen.items() if param.requires_grad]
        if thawed:
            self._frozen = {}
            warnings.warn(
                f"[engine] {', '.join(thawed)}: frozen when the engine was built, requires gradients now; this engine "
                "neither reduces its gradients nor updates it: destroy() the engine and build a new one to train it",
                stacklevel=3,
            )

    def _trainable(self, call: str) -> Runner:
        if self.core.destroyed():
            raise UsageError(f"[engine.{call}] the engine was destroyed; build a new one")
        if self._runner is None:
            raise UsageError(f"[engine.{call}] there is no optimizer; pass one to tessera.initialize or configure one")
        return self._runner

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """loss.backward(); returns loss / accumulation steps, or the loss with scale_wrt_gas=False. With that neither
        gradients nor the result are divided by the accumulation steps, for this call only."""
        self._trainable("backward")
        if not isinstance(loss, torch.Tensor):
            raise ConfigError(f"[engine.backward] loss must be a scalar tensor, got {type(loss).__name__}")
        scaled = self.core.begin_backward(loss, scale_wrt_gas)
        try:
            scaled.backward(retain_graph=retain_graph)
        finally:
            result = self.core.end_backward(loss)
        return result

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward() on directly; the loss itself where the precision needs no scaling. Once for each
        backward. An output of any shape will do: engine.scale(output).backward(gradient). Several engines of one loss:
        a.scale(b.scale(loss)), see docs/loss_scaling.md."""
        self._trainable("scale")
        if not isinstance(loss, torch.Tensor):
            raise ConfigError(f"[engine.scale] takes a scalar tensor (a loss) or an output, got {type(loss).__name__}")
        return self.core.scale(loss)

    @property
    def loss_scaler(self) -> LossScaler:
        """The present loss scale, how it changes, and its counters."""
        return LossScaler(self.core)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Counts a micro-step; at an accumulation boundary clips, updates, advances the schedule and drops gradients.
        Collective."""
        runner = self._trainable("step")
        core = self.core
        steps = core.global_steps()
        if not self.managed_gradient_accumulation() or core.is_gradient_accumulation_boundary():
            runner.before_step()
        try:
            applied = core.step(runner.external)
        finally:
            if isinstance(self.optimizer, Optimizer) and core.global_steps() != steps:
                self.optimizer.overflow = not core.was_step_applied()
        if core.global_steps() == steps:
            return
        runner.after_step(applied)
        if isinstance(self.optimizer, Optimizer):
            self.optimizer._opt_called = True
        if applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self._report()

    def _report(self) -> None:
        every = self.steps_per_print()
        if every and self._dp_rank == 0 and self.global_steps % every == 0:
            logger.info(
                "step=%d, skipped=%d, lr=%s, mom=%s",
                self.global_steps,
                self.skipped_steps,
                self.get_lr(),
                self.get_mom(),
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops every accumulated gradient, in the engine and in p.grad."""
        self.core.zero_grad()
        super().zero_grad(set_to_none=True)

    def grad_norm(self) -> float:
        """Global L2 norm of the gradients as they are now, before a step. Collective."""
        self._trainable("grad_norm")
        return self.core.grad_norm()

    # ---------------------------------------------------------------- accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """True when the next step() will update parameters."""
        return self.core.is_gradient_accumulation_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Overrides the count for the present micro-batch; call it before its forward and backward."""
        if not self.managed_gradient_accumulation():
            raise UsageError(
                "[engine.set_gradient_accumulation_boundary] with managed_gradient_accumulation false every step() is "
                "a boundary"
            )
        self.core.set_gradient_accumulation_boundary(is_boundary)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients accumulate on this rank, without communication. Any stage; at stage 2 this holds one full
        gradient of the model."""
        self.core.begin_no_sync()
        try:
            yield
        finally:
            self.core.end_no_sync()

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """As no_sync, and one reduction for everything inside when it ends. Collective at the end."""
        self.core.begin_coalesce()
        try:
            yield
        finally:
            self.core.end_coalesce()

    # ---------------------------------------------------------------- data, weights, life

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = False,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Loader:
        """A loader of this rank's part of `dataset`; the micro batch is the default batch size."""
        return make_loader(
            dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            rank=self._dp_rank,
            world_size=self._dp_size,
            route=route,
            pin_memory=pin_memory,
            data_sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            num_workers=self.num_local_io_workers if num_local_io_workers is None else num_local_io_workers,
            drop_last=self.config.get("dataloader_drop_last"),
        )

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """module.state_dict(), on request without frozen parameters. Stage 3: whole values, copied; collective."""
        with self._whole() as partitioned:
            state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
            if partitioned:
                copies: dict[int, torch.Tensor] = {}  # tied weights stay tied
                for name, value in state.items():
                    if isinstance(value, torch.Tensor):
                        state[name] = copies.setdefault(value.data_ptr() or id(value), value.detach().clone())
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: dict[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[[dict[str, Any], nn.Module], None] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """module.load_state_dict(); the masters follow. Every rank loads the same values. Collective in stage 3."""
        # A region in any stage: it sees what a custom function writes to p.data, too.
        numbers = list(range(len(self.core.params())))
        self.core.gather(numbers)
        writes = _core.Writes.None_
        try:
            if custom_load_fn is not None:
                custom_load_fn(checkpoint, self.module)
            else:
                self.module.load_state_dict(checkpoint, strict=strict)
            writes = _core.Writes.Own
        finally:
            with contextlib.suppress(RuntimeError) if writes == _core.Writes.None_ else contextlib.nullcontext():
                self.core.release(numbers, writes, 0)
        self.core.adopt_params()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[bool]:
        """A region in which all parameters are whole. Collective in stage 3; True where it gathers any."""
        if self.core.destroyed() or not self.config.placements.shards_params:
            yield False
            return
        groups = gathered(self.module.parameters(), writable=False)
        try:
            yield True
        except BaseException:
            with contextlib.suppress(RuntimeError):
                for core, numbers in groups:
                    core.release(numbers, _core.Writes.None_, 0)
            raise
        for core, numbers in groups:
            core.release(numbers, _core.Writes.None_, 0)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Rank 0 writes the module's state dict in the compute dtype, for torch.load. Collective."""
        if self.config.placements.shards_params and not self.zero_gather_16bit_weights_on_model_save():
            raise UsageError(
                "[engine.save_16bit_model] parameters are partitioned; set "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save to gather them for the file"
            )
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        if self._dp_rank == 0:
            os.makedirs(save_dir, exist_ok=True)
            copies: dict[int, torch.Tensor] = {}  # tied weights stay tied

            def tight(value: Any) -> Any:
                if not isinstance(value, torch.Tensor):
                    return value
                return copies.setdefault(value.data_ptr() if value.numel() else id(value), value.detach().clone())

            torch.save({name: tight(value) for name, value in state.items()}, os.path.join(save_dir, save_filename))
        for axis in (_core.Axis.DpShard, _core.Axis.DpReplicate):
            self._mesh.group(axis).barrier()
        return True

    def compile(self, backend: Any = "inductor", compile_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        """torch.compile of the module in place; a second call does nothing."""
        if not self.is_compiled:
            self.module.compile(backend=backend, **(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        return self.module._compiled_call_impl is not None

    def destroy(self) -> None:
        """Removes hooks, frees buffers and gives the client's optimizer back with its states. Parameters keep their
        values. Safe to call twice; afterwards the module can get a new engine."""
        if self.core.destroyed():
            return
        if self._runner is not None:
            self._runner.release()
            base = self._runner.base
            for name, value in self._lent.items():
                if value is None:
                    base.__dict__.pop(name, None)
                else:
                    setattr(base, name, value)
        if "_partition" in self.__dict__:
            self._partition.remove()
        self.core.destroy()
        self._mesh = _core.Mesh()
        remove_marks(self._marked)
        distributed.discard(self._own_groups)

    def __del__(self) -> None:
        # At the interpreter's end nobody is left to give anything back to, and torch may be half gone.
        if "core" in self.__dict__ and not sys.is_finalizing():
            self.destroy()

    def _not_served(self, call: str, instead: str) -> NoReturn:
        raise NotImplementedError(f"[engine.{call}] is not served by this version; {instead}")

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._not_served(
            "save_checkpoint",
            "save engine.module_state_dict() on rank 0 and engine.optimizer.state_dict() on every rank with torch.save",
        )

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._not_served(
            "load_checkpoint",
            "use engine.load_module_state_dict() and then engine.optimizer.load_state_dict() on every rank",
        )

    def offload_states(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._not_served("offload_states", "destroy() the engine to free its states")

    def reload_states(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._not_served("reload_states", "nothing is offloaded")


def _check_materialized(model: nn.Module) -> None:
    lazy = [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer))
    ]
    if lazy:
        raise ConfigError(
            f"[initialize] {', '.join(lazy)}: lazy modules have no shapes yet; run one forward of the model with a "
            "sample (under torch.no_grad()) before"
        )


def _cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """In place: who holds a buffer sees it."""
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def _step_of(engine: weakref.ref[Engine]) -> Callable[..., Any]:
    """optimizer.step() of a client's optimizer in the care of an engine: a complete step."""

    @functools.wraps(torch.optim.Optimizer.step)
    def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        live = engine()
        if live is None:
            return type(optimizer).step(optimizer)  # the engine is gone: torch's own
        live.step()
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # NativeRunner.after_step tells schedulers
    return step
