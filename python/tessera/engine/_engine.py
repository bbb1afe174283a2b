"""Engine: an nn.Module around the user's model. The core does the work; this class owns the parts of the front end and
orders the calls around forward, backward and step."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import ParamsT
from torch.utils.data import Dataset

from tessera import _core, _mesh, distributed
from tessera._config import ConfigLike, load_config
from tessera._copies import without_repeats
from tessera._device import checked_device, emulated
from tessera._former import former_attributes, former_methods
from tessera._loans import Loans, add_param_group_of, step_of, zero_grad_of, zero_grad_of_optimizer
from tessera._warnings import caught_warnings, warn_user
from tessera.data import Collate, Indexed, Loader
from tessera.engine import _build
from tessera.engine._accumulation import Accumulation
from tessera.engine._checkpoint import Checkpoints
from tessera.engine._contents import Contents
from tessera.engine._delegate import method_of, overloaded_of, property_of, weak
from tessera.engine._device import keep_device, move_to_device, settle_buffers
from tessera.engine._end import end, give_up
from tessera.engine._forward import Forward, compute_dtype
from tessera.engine._info import Info
from tessera.engine._joining import Joining, groups_of_frozen
from tessera.engine._loaders import Loaders
from tessera.engine._look import Look, own_error_first
from tessera.engine._moving import Moving
from tessera.engine._norms import Norms
from tessera.engine._preflight import check_modules
from tessera.engine._ranks import Ranks
from tessera.engine._report import warn_of
from tessera.engine._updates import Updates
from tessera.engine._watch import Watch
from tessera.engine._weights import Weights
from tessera.engine.front import Front
from tessera.engine.program import Program
from tessera.errors import ConfigError
from tessera.loss_scale import LossScaler
from tessera.lr_schedules import Scheduler
from tessera.optim.engines import (
    MakesOptimizer,
    MakesScheduler,
    Optimizer,
    as_lists,
    build_optimizer,
    build_schedule,
    given_sizes,
    keep_optimizer,
    mark_stepped,
    native_rule,
)
from tessera.parallel.engines import TensorParallel
from tessera.sequence import SequenceParallelGroups
from tessera.units import UnitPolicy, default_unit_policy
from tessera.zero.engines import Partition, partition_again, taken_over, whole_for_good
from tessera.zero.leaf import leaf_paths


@former_attributes(num_local_io_workers="num_workers")
@former_methods(get_global_grad_norm="global_grad_norm")
class Engine(nn.Module):
    """Trains `model` as `config` says. tessera.initialize() builds one from the usual arguments.

    `group`: the ranks (a torch ProcessGroup or a group of tessera; default: all processes), which the configuration's
    sizes lay out on axes, or a mesh of them (a DeviceMesh or a mesh of tessera: dp_replicate, dp_shard, sp, tp), or
    sequence.SequenceParallelGroups.
    `unit_policy`: which parameters travel together, see tessera.units.
    `sequence_parallel`: ranks of a sequence, in place of the configuration's sequence_parallel_size; `tensor_parallel`:
    ranks that the model is cut over, in place of tensor_parallel.autotp_size.
    `front`: the part of an object that has the engine and stands before it, see tessera.engine.front; `program`: of
    several engines that this one is a part of, see tessera.engine.program.
    Collective: every rank builds its engine at the same time; parameters start with rank 0's values.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    basic_optimizer: torch.optim.Optimizer | None
    lr_scheduler: Scheduler | None
    client_optimizer: MakesOptimizer | torch.optim.Optimizer | None
    client_lr_scheduler: MakesScheduler | Scheduler | None
    training_dataloader: Loader | None
    collate_fn: Collate | None
    device: torch.device
    local_rank: int
    core: _core.Engine  # the compiled engine
    # The parts, in the order in which they are made; those before the core's exist for the core.
    _settings: _core.Config
    _front: Front[Engine]
    _program: Program
    _loans: Loans
    _ranks: Ranks
    _watch: Watch
    _parallel: TensorParallel
    _updates: Updates
    _partition: Partition
    _contents: Contents
    _joining: Joining
    _look: Look
    _norms: Norms
    _accumulation: Accumulation
    _forward: Forward
    _moving: Moving
    _info: Info
    _weights: Weights
    _checkpoints: Checkpoints
    _loaders: Loaders
    open_regions: list[frozenset[int]]  # ids of the parameters of each zero.GatheredParameters

    def __init__(
        self,
        model: nn.Module,
        config: ConfigLike,
        *,
        optimizer: torch.optim.Optimizer | MakesOptimizer | None = None,
        model_parameters: ParamsT | None = None,
        lr_scheduler: Scheduler | MakesScheduler | None = None,
        training_data: Dataset[object] | Indexed[object] | None = None,
        collate_fn: Collate | None = None,
        group: _mesh.Ranks | SequenceParallelGroups | None = None,
        unit_policy: UnitPolicy | None = None,
        sequence_parallel: int | None = None,
        tensor_parallel: int | None = None,
        front: Front[Engine] | None = None,
        program: Program | None = None,
    ) -> None:
        super().__init__()
        self._front = front or Front[Engine]()
        self._program = program or Program()
        self._settings = load_config(config)
        self.module = model
        self.local_rank = distributed.local_rank()
        self.client_optimizer = optimizer
        self.client_lr_scheduler = lr_scheduler
        self.collate_fn = collate_fn
        self.num_workers = 0
        self.open_regions = []
        self._loans = Loans()
        this = weak(self)
        if isinstance(group, SequenceParallelGroups):
            group = group.mesh(self._settings.tensor_parallel.autotp_size)
        self._info, self._weights = Info(this), Weights(this)
        self._checkpoints, self._loaders = Checkpoints(this), Loaders(this)
        device = checked_device(group, model.parameters())
        self._warnings: list[tuple[str, int]] = []
        with caught_warnings(self._warn_user):
            self._ranks = Ranks(group, self._settings, device, sequence_parallel, tensor_parallel)
        self._warn(self._settings.warnings)
        put_back = [keep_optimizer(optimizer), keep_device(model)]
        try:
            batch = self._settings.resolve_batch(self._ranks.dp_world_size)
            partitions = self._settings.placements.shards_params and self._ranks.share_states() > 1
            check_modules(model, partitions, runs_on=bool(self._settings.tessera.update_runs_on))
            self._watch = Watch(self._settings, self._logging_rank(), self._warnings)
            if self._watch.calls is not None:
                self._ranks.mesh = _core.timed_mesh(self._ranks.mesh, self._watch.calls)
            self._parallel = TensorParallel(model, self._settings, self._ranks.mesh, cuts=self._ranks.cuts)
            self._warn(self._parallel.warnings)
            self.device = move_to_device(model, device)
            self._warn(emulated(self._settings, self.device))
            model_parameters = as_lists(model_parameters)
            base = self._build_optimizer(model_parameters)
            own = not isinstance(optimizer, torch.optim.Optimizer)
            joins = groups_of_frozen(model, base, model_parameters, own)
            self._program.optimizer_made(base, given_sizes(model, self.client_optimizer, model_parameters))
            if not self._is_to_train():
                _core.check_without_optimizer(self._settings)
            # All that the caller's arguments can make fail comes before the core, which changes the parameters.
            self.lr_scheduler = build_schedule(self._settings, optimizer, base, lr_scheduler)
            self.training_dataloader = (
                None if training_data is None else self.data_loader(training_data, batch.micro_batch_size)
            )
            self._parallel.cut(whole_for_good, partition_again)
            with caught_warnings(self._warn_user):
                self._build_core(base, unit_policy or default_unit_policy, joins)
            self._parallel.settle()
            if self._front.counts_empty_steps:
                self.core.count_empty_steps()
            self._watch.built(self)
        except BaseException:
            give_up(self)
            self.destroy()
            for put in put_back:
                put()
            raise

    # ---------------------------------------------------------------- construction

    def _logging_rank(self) -> int:
        """This rank's number among those of the engine; number 0 logs progress."""
        return self._ranks.number() if self._program.speaks() else 1

    def _warn(self, lines: list[str]) -> None:
        """Warns once, of what all ranks would say alike."""
        if self._logging_rank() == 0:
            warn_of(lines)
            self._note(lines)

    def _warn_user(self, lines: list[str]) -> None:
        """On this rank."""
        self._note(lines)
        warn_user(lines)

    def _note(self, lines: list[str]) -> None:
        """Puts lines into the files of numbers."""
        samples = self.core.global_samples() if hasattr(self, "core") else 0
        self._warnings += [(line, samples) for line in lines]
        if "_watch" in vars(self):
            self._watch.monitor.send_warnings()

    def _build_optimizer(self, model_parameters: object) -> torch.optim.Optimizer | None:
        more = {"is_cut": self._parallel.cuts_params, "keep_empty": self._program.of_several}
        base = build_optimizer(self._settings, self.module, self.client_optimizer, model_parameters, **more)
        return None if base is None else self._front.built(self._settings, self.client_optimizer, base)

    def _is_to_train(self) -> bool:
        """The caller or the configuration has an optimizer."""
        return self.client_optimizer is not None or bool(self._settings.optimizer.type)

    def _build_core(self, base: torch.optim.Optimizer | None, policy: UnitPolicy, joins: dict[int, int]) -> None:
        settings, module, loans = self._settings, self.module, self._loans
        self._program.buildable()
        if (device := self._program.device()) is not None and not any(True for _ in module.parameters()):
            self.device = device
        rule = None if base is None else native_rule(base)
        options = _build.options_of(settings, base, rule, self._ranks)
        _build.mark_dtypes(module, settings, options, loans)
        units, lines = _build.units_of(module, settings, policy, loans)
        self._warn(lines)
        specs = _build.specs_of(module, base, units, options.autocast.enabled, self._parallel, joins)
        if self._is_to_train() and not self._program.of_several:
            self._warn(_core.nothing_trained(specs.params))
        self.core = _core.Engine(options, self._ranks.mesh, specs.params, _build.group_options(base, rule))
        self._updates = _build.updates_of(self.core, specs, settings, self._ranks)
        buffers = (b for b in module.buffers() if b.layout == torch.strided and not b.is_meta)
        self.core.broadcast_buffers([without_repeats(b) for b in buffers])
        taken_over(module)
        leaves = leaf_paths(module) if settings.placements.shards_params else []
        covers = set(units.values())
        self._partition = Partition(self, self.core, loans, module, self._updates.index, covers, leaves)
        settle_buffers(module, settings)
        if settings.placements.shards_states and not isinstance(module, torch.jit.ScriptModule):
            loans.put(module, "zero_grad", zero_grad_of(weakref.ref(self), module))
            loans.keep_off_copies(module)
        self._updates.runner = _build.runner_of(self._updates, base, rule)
        self.basic_optimizer = base
        self.optimizer = self._visible_optimizer(options)
        self._add_parts(base)

    def _add_parts(self, base: torch.optim.Optimizer | None) -> None:
        core, this = self.core, weak(self)
        warn = (lambda lines: this._warn(lines)) if self._logging_rank() == 0 else None
        self._contents = Contents(self.module, core, base, warn)
        self._joining = Joining(weak(self), self._updates, self._partition)
        self._look = Look(weak(self), self._settings, self._updates, self._joining, self._contents)
        self._norms = Norms(self._updates, self._joining, self._look, self.device)
        self._moving = Moving(core, lambda lines: this._warn_user(lines))
        self._accumulation = Accumulation(core, self._settings.managed_gradient_accumulation)
        shares, casts = self._ranks.sp_world_size > 1, self._program.casts_inputs
        self._forward = Forward(core, self._parallel, self._partition, self._look, self.device, warn, shares, casts)
        self.cast_forward_inputs = False
        self._watches_sequence = shares and self._settings.sequence_parallel_size > 1

    def _visible_optimizer(self, options: _core.EngineOptions) -> torch.optim.Optimizer | None:
        """The client's own object where its states can be what it expects (stage 0, fp32), else a wrapper."""
        if self._updates.runner is None:
            return None
        base = self._updates.runner.base
        this = weakref.ref(self)
        self._loans.put(base, "step", types.MethodType(step_of(this), base))
        self._loans.put(base, "add_param_group", types.MethodType(add_param_group_of(this), base))
        if self._updates.params_are_masters:
            return base
        self._loans.put(base, "zero_grad", types.MethodType(zero_grad_of_optimizer(this), base))
        return self._front.optimizer_class(self)(self, self._updates.runner)

    # ---------------------------------------------------------------- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or self._settings.placements.shards_params:
            self.core.check_not_captured("forward")
        with self._watch.around_forward(self):
            return self._forward.run(self.module, args, kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Calls loss.backward(); returns loss / accumulation steps, or the loss with scale_wrt_gas=False. With that
        neither gradients nor the result are divided by the accumulation steps, for this call only."""
        self._updates.trained_by("backward")
        if not isinstance(loss, torch.Tensor):
            raise ConfigError(f"[engine.backward] loss must be a scalar tensor, got {type(loss).__name__}")
        scaled = self.core.begin_backward(loss, scale_wrt_gas)
        try:
            scaled.backward(retain_graph=retain_graph)
        finally:
            result = self.core.end_backward(loss)
        return result

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss to call backward() on directly; the loss itself where the precision needs no scaling. Once
        for each backward. An output of any shape will do: engine.scale(output).backward(gradient). Several engines of
        one loss: a.scale(b.scale(loss)), see docs/loss_scaling.md."""
        self._updates.trained_by("scale")
        if not isinstance(loss, torch.Tensor):
            raise ConfigError(f"[engine.scale] takes a scalar tensor (a loss) or an output, got {type(loss).__name__}")
        return self.core.scale(loss)

    @property
    def loss_scaler(self) -> LossScaler:
        """The present loss scale, how it changes, and its counters."""
        return LossScaler(self.core)

    def step(self, lr_kwargs: dict[str, Any] | None = None, *, global_norm: float | None = None) -> None:
        """Counts a micro-step; at an accumulation boundary clips, updates, advances the schedule and drops gradients.
        `global_norm`: the norm to clip by in place of the engine's own, the same on all ranks; inf or NaN skips the
        step in every precision. tessera.step_together() makes the norm of several engines. ValueError, with nothing
        counted, for a norm that is negative or not the same, and between boundaries. At a boundary, on all ranks and
        with nothing updated or counted: ValueError where ranks differ in what they step by (rates, micro-batches,
        calls) or one of them cannot step, which gets its own error; UsageError where parameters of the module were
        replaced since the engine was built. With tessera.update_in_backward the backward has looked, before it updated
        anything. Collective."""
        with self._front.stepping(self):
            self._step(lr_kwargs, global_norm)

    def _step(self, lr_kwargs: dict[str, Any] | None, global_norm: float | None) -> None:
        runner = self._updates.trained_by("step")
        core = self.core
        core.check_not_captured("step")
        steps = core.global_steps()
        boundary = self._accumulation.at_boundary()
        fault, problem = "", None
        if boundary:
            fault, problem = self._look.look(before_step=not self._look.in_backward)
        else:
            self._joining.follow()
        self._partition.end_stray()
        try:
            with caught_warnings(self._warn_user), own_error_first(problem):
                applied = core.step(None if runner.external is None else self._update, global_norm, fault)
        finally:
            self._joining.settle()
            if isinstance(self.optimizer, Optimizer) and core.global_steps() != steps:
                self.optimizer.overflow = not core.was_step_applied()
        self._warn_user(core.take_notices())
        if core.global_steps() == steps:
            return
        runner.after_step(applied)
        if applied and self._watches_sequence:
            self._watches_sequence = False
            self._warn([f"[engine.step] {fault}" for fault in [core.sequence_fault()] if fault])
        if isinstance(self.optimizer, Optimizer):
            mark_stepped(self.optimizer)
        if applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self._watch.stepped(self)

    def join_thawed(self) -> None:
        """Lets parameters that began to be trained after the engine was built take part from here on. Collective."""
        self._front.settle(self)
        self._joining.join()

    def _whole(self) -> Any:
        self._front.settle(self)
        return self._weights.whole()

    def _update(self) -> None:
        self._joining.settle()
        update = self._updates.trained_by("step").external
        assert update is not None
        update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops every accumulated gradient, in the engine and in p.grad."""
        self.core.zero_grad()
        super().zero_grad(set_to_none=True)

    @property
    def cast_forward_inputs(self) -> bool:
        """Whether each forward casts and moves its inputs, as tessera.cast_inputs() does; no by default. With
        fp16.auto_cast forwards cast them, too, and do not move them."""
        return self._forward.input_device is not None

    @cast_forward_inputs.setter
    def cast_forward_inputs(self, on: bool) -> None:
        auto_cast = torch.float16 if self._settings.fp16.enabled and self._settings.fp16.auto_cast else None
        self._forward.input_dtype = compute_dtype(self) if on else auto_cast
        self._forward.input_device = self.device if on else None

    # ---------------------------------------------------------------- compiler

    def compile(
        self, backend: str | Callable[..., object] = "inductor", compile_kwargs: dict[str, Any] | None = None
    ) -> None:
        """torch.compile of the module in place, with `compile_kwargs`; once. Stage 3: unit by unit. docs/compile.md"""
        if not self.is_compiled:
            self._partition.hide_from_compiler(self.module)
            self.module.compile(backend=backend, **(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        """Whether compile() was called."""
        return self.module._compiled_call_impl is not None

    def _not_served(self, call: str, instead: str) -> NoReturn:
        raise NotImplementedError(f"[engine.{call}] is not served by this version; {instead}")

    # ---------------------------------------------------------------- life

    def destroy(self) -> None:
        """Removes hooks, frees buffers and gives the client's optimizer back. Parameters keep their values; in stage 3
        those of an open region (zero.GatheredParameters) do. The optimizer's states are whole where every rank had
        all of them, and for parameters of an open region in every stage: collective then. Else they are this rank's
        parts, which a new engine of the same ranks goes on with, and torch's own step() refuses. Safe to call twice;
        afterwards the module is as plain as before and can get a new engine."""
        end(self)

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if name.startswith("_") or module is None or not hasattr(module, name):
                raise
            text = f"[engine] the engine has no '{name}', its module has: engine.module.{name}"
            raise AttributeError(text, name=name, obj=self) from None

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "[engine] an engine cannot be pickled or copied, it holds process groups and buffers: save_checkpoint() "
            "has the run, module_state_dict() the weights; build another by tessera.initialize()"
        )

    def __del__(self) -> None:
        # At the interpreter's end nobody is left to give anything back to, and torch may be half gone.
        if "core" in self.__dict__ and not sys.is_finalizing():
            self.open_regions = []  # this rank alone
            end(self, waits=False)

    # ---------------------------------------------------------------- what parts do: bodies and docstrings are theirs

    lend = method_of("_loans", Loans.lend)
    trains = method_of("_updates", Updates.optimizes)
    param_number = method_of("_updates", Updates.number)
    trained_numbers = method_of("_updates", Updates.numbers)
    end_interrupted_calls = method_of("_partition", Partition.end_stray)

    add_param_group = method_of("_joining", Joining.add_param_group)
    masters = method_of("_updates", Updates.masters)
    load_masters = method_of("_updates", Updates.load_masters)
    optimizer_states = method_of("_updates", Updates.optimizer_states)

    sum = method_of("_norms", Norms.sum)
    mean = method_of("_norms", Norms.mean)
    token_mean = method_of("_norms", Norms.token_mean)
    grad_norm = method_of("_norms", Norms.grad_norm)
    norm_contribution = method_of("_norms", Norms.norm_contribution)
    clip_grad_norm_ = method_of("_norms", Norms.clip_grad_norm_)

    save_checkpoint = method_of("_checkpoints", Checkpoints.save_checkpoint)
    wait_for_checkpoint = method_of("_checkpoints", Checkpoints.wait_for_checkpoint)
    load_checkpoint = overloaded_of("_checkpoints", Checkpoints.load_checkpoint)
    save_16bit_model = method_of("_checkpoints", Checkpoints.save_16bit_model)

    data_loader = method_of("_loaders", Loaders.data_loader)

    module_state_dict = method_of("_weights", Weights.module_state_dict)
    load_module_state_dict = method_of("_weights", Weights.load_module_state_dict)

    offload_states = method_of("_moving", Moving.offload_states)
    finish_update = method_of("_moving", Moving.finish_update)
    reload_states = method_of("_moving", Moving.reload_states)

    is_gradient_accumulation_boundary = method_of("_accumulation", Accumulation.is_gradient_accumulation_boundary)
    set_gradient_accumulation_boundary = method_of("_accumulation", Accumulation.set_gradient_accumulation_boundary)
    no_sync = method_of("_accumulation", Accumulation.no_sync)
    coalesce_grad_reduction = method_of("_accumulation", Accumulation.coalesce_grad_reduction)

    micro_steps = property_of("_info", Info.micro_steps)
    global_steps = property_of("_info", Info.global_steps)
    skipped_steps = property_of("_info", Info.skipped_steps)
    was_step_applied = method_of("_info", Info.was_step_applied)
    global_grad_norm = method_of("_info", Info.global_grad_norm)
    train_batch_size = method_of("_info", Info.train_batch_size)
    train_micro_batch_size_per_gpu = method_of("_info", Info.train_micro_batch_size_per_gpu)
    gradient_accumulation_steps = method_of("_info", Info.gradient_accumulation_steps)
    set_train_batch_size = method_of("_info", Info.set_train_batch_size)
    set_train_micro_batch_size = method_of("_info", Info.set_train_micro_batch_size)
    recompute = method_of("_info", Info.recompute)
    expect = method_of("_info", Info.expect)
    count_flops = method_of("_info", Info.count_flops)
    memory = method_of("_info", Info.memory)
    phase_seconds = method_of("_info", Info.phase_seconds)
    step_seconds = property_of("_info", Info.step_seconds)
    timed_calls = property_of("_info", Info.timed_calls)
    comm_summary = method_of("_info", Info.comm_summary)
    get_lr = method_of("_info", Info.get_lr)
    parallel_plan = method_of("_info", Info.parallel_plan)
    monitor = property_of("_info", Info.monitor)
    flops_profiler = property_of("_info", Info.flops_profiler)

    world_size = property_of("_ranks", Ranks.world_size)
    global_rank = property_of("_ranks", Ranks.global_rank)
    dp_world_size = property_of("_ranks", Ranks.dp_world_size)
    seq_dp_world_size = property_of("_ranks", Ranks.seq_dp_world_size)
    sp_world_size = property_of("_ranks", Ranks.sp_world_size)
    tp_world_size = property_of("_ranks", Ranks.tp_world_size)
    process_group = method_of("_ranks", Ranks.process_group)
    dp_rank = property_of("_ranks", Ranks.dp_rank)
    sp_rank = property_of("_ranks", Ranks.sp_rank)
    tp_rank = property_of("_ranks", Ranks.tp_rank)

    # ---------------------------------------------------------------- progress and configuration

    @property
    def global_samples(self) -> int:
        """Samples of all ranks, in the optimizer steps so far."""
        return self.core.global_samples()

    @global_samples.setter
    def global_samples(self, samples: int) -> None:
        self.core.set_counters(self.micro_steps, self.global_steps, self.skipped_steps, samples)

    @property
    def config(self) -> _core.Config:
        """The configuration, resolved: config.zero_optimization.stage."""
        return self._settings

    @property
    def communication_data_type(self) -> torch.dtype:
        """dtype of the gradients that travel."""
        return self._info.gradient_dtype()
