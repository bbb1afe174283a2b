"""Engine: an nn.Module around the user's model. The core does the work; this class converts, orders the calls around
forward, backward and step, and keeps what only Python has (schedules, loaders, the client's objects)."""

from __future__ import annotations

import contextlib
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from tessera import _core, _mesh, distributed
from tessera._config import load_config
from tessera._copies import own_copies, without_repeats
from tessera._device import checked_device, emulated
from tessera._loans import Loans, add_param_group_of, step_of, zero_grad_of, zero_grad_of_optimizer
from tessera._outputs import tensors_in
from tessera.autocast import (
    PARAM_COMM_DTYPE_ATTR_NAME,
    cast_floating,
    get_comm_dtype,
    has_comm_dtype,
    init_autocast_params,
)
from tessera.data import Loader, make_loader
from tessera.elasticity import with_elastic_batch
from tessera.engine._checkpoint import EngineCheckpoints
from tessera.engine._contents import Contents
from tessera.engine._end import EngineEnd
from tessera.engine._joining import EngineJoining, groups_of_frozen
from tessera.engine._look import EngineLook, own_error_first
from tessera.engine._moving import EngineMoving
from tessera.engine._norms import EngineNorms
from tessera.engine._parallel import TensorParallel
from tessera.engine._place import keep_place, place, settle_buffers
from tessera.engine._preflight import check_modules, wants_all_used
from tessera.engine._report import logger
from tessera.engine._watch import Watch
from tessera.errors import ConfigError, UsageError
from tessera.loss_scale import LossScaler
from tessera.optim._factory import (
    as_lists,
    build_optimizer,
    build_schedule,
    describe,
    keep_optimizer,
    nothing_trained,
    params_of,
)
from tessera.optim._rules import native_rule, read_group
from tessera.optim._runners import ExternalRunner, NativeRunner, Runner
from tessera.optim._slices import SlicesRunner
from tessera.optim._whole import WholeOptimizer
from tessera.optim._wrapper import Optimizer
from tessera.sequence._huggingface import attends_locally
from tessera.units import ROOT, UnitPolicy, default_unit_policy, outline
from tessera.zero._hooks import Partition
from tessera.zero._init import early_of, taken_over
from tessera.zero._leaf import LEAF_MARK, apply_config, leaf_paths, z3_leaf_module
from tessera.zero._regions import Region, parts_of


class Engine(EngineCheckpoints, EngineEnd, EngineJoining, EngineLook, EngineMoving, EngineNorms):
    """Trains `model` as `config` says. tessera.initialize() builds one from the usual arguments.

    `group`: the ranks (a torch ProcessGroup or a group of tessera; default: all processes), which the configuration's
    sizes lay out on axes, or a mesh of them (a DeviceMesh or a mesh of tessera: dp_replicate, dp_shard, sp, tp).
    `unit_policy`: which parameters travel together, see tessera.units.
    `sequence_parallel`: ranks of a sequence, in place of the configuration's sequence_parallel_size; `tensor_parallel`:
    ranks that the model is cut over, in place of tensor_parallel.autotp_size.
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
        sequence_parallel: int | None = None,
        tensor_parallel: int | None = None,
    ) -> None:
        super().__init__()
        self._settings = load_config(config)
        self.module = model
        self.local_rank = distributed.local_rank()
        self.client_optimizer = optimizer
        self.client_lr_scheduler = lr_scheduler
        self.collate_fn = collate_fn
        self.num_local_io_workers = 0
        self._runner = None
        self._open_regions = []
        self._loans = Loans()
        device = checked_device(group, model.parameters())
        sizes = _mesh.mesh_sizes(self._settings)
        if sequence_parallel is not None:
            sizes["sp"] = sequence_parallel
        if tensor_parallel is not None:
            sizes["tp"] = tensor_parallel
        self._mesh, self._own_groups = _mesh.core_mesh(group, **sizes, device=device)
        self._dp_rank, self._dp_size = self._mesh.batch_rank(), self._mesh.batch_size()
        self._world = _mesh.world_of(self._mesh)
        self._warn(self._settings.warnings)
        self._says_what_is_local = self._mesh.size(_core.Axis.Sp) > 1 and self._telling_rank() == 0
        put_back = [keep_optimizer(optimizer), keep_place(model)]
        try:
            self._settings = with_elastic_batch(self._settings, self._dp_size)
            batch = self._settings.resolve_batch(self._dp_size)
            runs_on = bool(self._settings.get("tessera.update_runs_on"))
            check_modules(model, partitions=self._partitions(), runs_on=runs_on)
            self._watch = Watch(self._settings, self._telling_rank())
            if self._watch.calls is not None:
                self._mesh = _core.timed_mesh(self._mesh, self._watch.calls)
            self._parallel = TensorParallel(model, self._settings, self._mesh, cuts=sizes["tp"] > 1)
            self._warn(self._parallel.warnings)
            self.device = place(model, device)
            self._warn(emulated(self._settings, self.device))
            model_parameters = as_lists(model_parameters)
            base = self._build_optimizer(model_parameters)
            own = not isinstance(optimizer, torch.optim.Optimizer)
            self._joins = groups_of_frozen(model, base, model_parameters, own)
            self._check_optimizer(base)
            # All that the caller's arguments can make fail comes before the core, which changes the parameters.
            self.lr_scheduler = build_schedule(self._settings, optimizer, base, lr_scheduler)
            self.training_dataloader = (
                None if training_data is None else self.deepspeed_io(training_data, batch.micro_batch_size)
            )
            self._parallel.cut()
            self._build_core(base, unit_policy or default_unit_policy)
            self._parallel.settle()
            self._watch.built(self)
        except BaseException:
            self._give_up()
            for put in put_back:
                put()
            raise

    # ---------------------------------------------------------------- construction

    def _warn(self, lines: list[str]) -> None:
        """Once, of what all ranks would say alike."""
        for line in lines if self._telling_rank() == 0 else []:
            logger.warning(line)

    def _partitions(self) -> bool:
        ranks = self._mesh.size(_core.Axis.DpShard) * self._mesh.size(_core.Axis.Sp)  # that share model states
        return self._settings.placements.shards_params and ranks > 1

    def _build_optimizer(self, model_parameters: Any) -> torch.optim.Optimizer | None:
        more = {"is_cut": self._parallel.cuts_params, "keep_empty": self._of_several}
        return build_optimizer(self._settings, self.module, self.client_optimizer, model_parameters, **more)

    def _check_optimizer(self, base: torch.optim.Optimizer | None) -> None:
        placements, stage = self._settings.placements, self._settings.get("zero_optimization.stage")
        requires = placements.shards_states and not placements.shards_params
        if self.client_optimizer is None and not self._settings.get("optimizer.type"):
            if requires:
                raise ConfigError(
                    f"[initialize] zero_optimization.stage {stage} requires an optimizer; pass one or use stage 0"
                )
            return
        nothing = "" if self._of_several else nothing_trained(base, self.module)
        if nothing and base is None and requires:
            raise ConfigError(
                f"[initialize] {nothing}, and zero_optimization.stage {stage} cuts what an optimizer has; thaw what is "
                "to be trained before, or use stage 0 or 3 to evaluate"
            )
        if nothing:
            self._warn([f"[initialize] {nothing}: until something is, this engine only evaluates"])

    def _build_core(self, base: torch.optim.Optimizer | None, policy: UnitPolicy) -> None:
        rule = None if base is None else native_rule(base)
        options = _core.engine_options(self._settings, self._dp_size)
        options.rule = rule.rule if rule is not None else _core.Rule.External
        if base is not None and rule is None:
            options.client_optimizer = describe(base)
        self._input_dtype = torch.float16 if self.fp16_enabled() and self._settings.get("fp16.auto_cast") else None
        if options.autocast.enabled:
            modules = self._settings.get("torch_autocast.lower_precision_safe_modules")
            with self._loans.watching(self.module.parameters(), PARAM_COMM_DTYPE_ATTR_NAME):
                init_autocast_params(self.module, options.autocast.dtype, modules)

        units = self._units(policy)
        specs, index = self._specs(base, units, options.autocast.enabled)
        groups = [_core.GroupOptions() for _ in base.param_groups] if base is not None else []
        if base is not None and rule is not None:
            for number, group in enumerate(groups):
                read_group(rule, base, number, group)
        self.core = _core.Engine(options, self._mesh, specs, groups)
        buffers = (b for b in self.module.buffers() if b.layout == torch.strided and not b.is_meta)
        self.core.broadcast_buffers([without_repeats(b) for b in buffers])
        taken_over(self.module)
        self._index = {id(spec.tensor): number for number, spec in enumerate(specs)}
        self._optimized = frozenset(index.values())
        # Of these nobody has said who trains them.
        self._frozen = {s.name: s.tensor for s in specs if s.group < 0 > s.joins and not s.tensor.requires_grad}
        leaves = leaf_paths(self.module) if self._settings.placements.shards_params else []
        covers = set(units.values())
        self._partition = Partition(self, self.core, self._loans, self.module, self._index, covers, leaves)
        settle_buffers(self.module, self._settings)
        if self._settings.placements.shards_states and not isinstance(self.module, torch.jit.ScriptModule):
            self._loans.put(self.module, "zero_grad", zero_grad_of(weakref.ref(self), self.module))
            self._loans.keep_off_copies(self.module)
        self._runner = self._make_runner(base, rule, index)
        self._updates_in_backward = bool(self._settings.get("tessera.update_in_backward"))
        self._wants_all_used = wants_all_used(self._settings)
        self.basic_optimizer = base
        self.optimizer = self._visible_optimizer(options)
        self._contents = self._contents_now(self.core, base)

    def _units(self, policy: UnitPolicy) -> dict[str, str]:
        units = policy(self.module)
        if not self._settings.placements.shards_params:
            return units
        with self._loans.watching(self.module.modules(), LEAF_MARK):
            self._warn(apply_config(self.module, self._settings))
        for module in self.module.modules():
            if z3_leaf_module(module):
                for param in module.parameters():
                    self._loans.put(param, LEAF_MARK, True)
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
        names = {id(param): name for name, param in named}
        # By param group, in its order; with whether it is trained. An optimizer may get other objects in their place.
        self._group_names = [
            [(names[id(param)], param.requires_grad) for param in group["params"]]
            for group in (base.param_groups if base is not None else [])
        ]
        specs = [
            _core.ParamSpec(
                name,
                param,
                group_of.get(id(param), -1),
                units.get(name, ROOT),
                *early_of(param),
                get_comm_dtype(param) if marked and has_comm_dtype(param) else None,
                *self._parallel.spec_of(param),
                joins=self._joins.get(id(param), -1),
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
        if isinstance(base, WholeOptimizer):
            return SlicesRunner(self.core, base, index, self._params_are_masters(), self._cuts_states())
        return ExternalRunner(self.core, base, index, on_params=self._params_are_masters())

    def _cuts_states(self) -> bool:
        return self._settings.placements.shards_states and self.seq_dp_world_size > 1

    def _optimizes(self, param: torch.Tensor) -> bool:
        return self._index.get(id(param)) in self._optimized

    def _params_are_masters(self) -> bool:
        return not self._settings.placements.shards_states and self.core.options().zero.precision.master_is_param()

    def _contents_now(self, core: _core.Engine, base: torch.optim.Optimizer | None) -> Contents:
        def known() -> list[torch.Tensor]:
            joining = [] if base is None else params_of(base.param_groups)
            return [*(spec.tensor for spec in core.params()), *joining]

        return Contents(self.module, known, tells=self._telling_rank() == 0)

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
        base = self._runner.base
        this = weakref.ref(self)
        self._loans.put(base, "step", types.MethodType(step_of(this), base))
        self._loans.put(base, "add_param_group", types.MethodType(add_param_group_of(this), base))
        if self._params_are_masters():
            return base
        self._loans.put(base, "zero_grad", types.MethodType(zero_grad_of_optimizer(this), base))
        return Optimizer(self, self._runner)

    def _telling_rank(self) -> int:
        """This rank's number among those of the engine; number 0 tells of progress."""
        return self._mesh.rank(list(_core.Axis.__members__.values()))

    # ---------------------------------------------------------------- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or self._settings.placements.shards_params:
            self.core.check_not_captured("forward")
        if self._watch.profiles(self):
            with self._watch.profiled(self):
                return self._forward(args, kwargs)
        return self._forward(args, kwargs)

    def _forward(self, args: Any, kwargs: Any) -> Any:
        core = self.core
        self._look_before_forward()
        if self._says_what_is_local:  # now: registration may come after the engine
            self._says_what_is_local = False
            self._warn(attends_locally(self.module))
        if self._input_dtype is not None:
            args, kwargs = cast_floating((args, kwargs), self._input_dtype)
        self._parallel.before_forward(args, kwargs, self.device)
        with self._partition.forward():
            switched_off = core.pre_forward()
            try:
                if switched_off and self._telling_rank() == 0:
                    logger.warning(
                        "[engine] forward runs without autocast: its configuration does not enable torch_autocast, so "
                        "the torch.autocast region around it is switched off inside"
                    )
                outputs = self.module(*args, **kwargs)
                core.post_forward(tensors_in(outputs))
                self._parallel.after_forward(self.device)
            except BaseException as error:
                told = self._parallel.explained(error)
                core.abort_forward()
                raise told  # noqa: B904 (mostly the same one)
            finally:
                self._parallel.end_forward(self.device)
        return outputs

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

    def step(self, lr_kwargs: dict[str, Any] | None = None, *, global_norm: float | None = None) -> None:
        """Counts a micro-step; at an accumulation boundary clips, updates, advances the schedule and drops gradients.
        `global_norm`: what to clip by in place of the engine's own norm, the same on all ranks; inf or NaN skips the
        step in every precision. tessera.step_together() makes that of several engines. ValueError, with nothing
        counted, for one that is negative or not the same, and between boundaries. At a boundary, on all ranks and with
        nothing updated or counted: ValueError where they differ in what they step by (rates, micro-batches, calls) or
        one of them cannot step, which gets its own error; UsageError where parameters of the module were replaced since
        the engine was built. With tessera.update_in_backward the backward has looked, before it updated anything.
        Collective."""
        runner = self._trainable("step")
        core = self.core
        core.check_not_captured("step")
        steps = core.global_steps()
        boundary = not self.managed_gradient_accumulation() or core.is_gradient_accumulation_boundary()
        fault, problem = "", None
        if boundary:
            fault, problem = self._look(before_step=not self._updates_in_backward)
        else:
            self._follow_params()
        self._partition.end_stray()
        try:
            with own_error_first(problem):
                applied = core.step(None if runner.external is None else self._update, global_norm, fault)
        finally:
            self._settle_joined()
            if isinstance(self.optimizer, Optimizer) and core.global_steps() != steps:
                self.optimizer.overflow = not core.was_step_applied()
        for line in core.take_notices():
            warnings.warn(line, stacklevel=2)
        if core.global_steps() == steps:
            return
        runner.after_step(applied)
        if isinstance(self.optimizer, Optimizer):
            self.optimizer._opt_called = True
        if applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self._watch.stepped(self)

    def _update(self) -> None:
        self._settle_joined()
        update = self._trainable("step").external
        assert update is not None
        update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops every accumulated gradient, in the engine and in p.grad."""
        self.core.zero_grad()
        super().zero_grad(set_to_none=True)

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
        """Gradients accumulate on this rank, without communication. Any stage; stage 2 holds a full gradient then."""
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
            drop_last=self._settings.get("dataloader_drop_last"),
        )

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """module.state_dict(), on request without frozen parameters. Stage 3 and tensor parallelism: whole values,
        copied; collective. So it is where an update runs on (finish_update())."""
        with self._whole() as partitioned:
            state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
            if partitioned:
                state.update(own_copies(state))
            self._parallel.make_whole(state, prefix)
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
        everything = list(range(len(self.core.params())))
        with Region([(self.core, everything)], _core.Writes.Own):
            if custom_load_fn is not None:
                custom_load_fn(checkpoint, self.module)
            else:
                self.module.load_state_dict(self._parallel.slices(checkpoint), strict=strict)
        self.core.adopt_params()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[bool]:
        """A region in which all parameters are whole. Collective in stage 3; True where it gathers any."""
        if not self.core.destroyed():
            self.core.finish_update()
        if self.core.destroyed() or not self._settings.placements.shards_params:
            yield False
            return
        with Region(parts_of(self.module.parameters(), writable=False)):
            yield True

    def compile(self, backend: Any = "inductor", compile_kwargs: dict[str, Any] | None = None) -> None:
        """torch.compile of the module in place, with `compile_kwargs`; once. Stage 3: unit by unit. docs/compile.md"""
        if not self.is_compiled:
            self._partition.hide_from_compiler(self.module)
            self.module.compile(backend=backend, **(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        return self.module._compiled_call_impl is not None

    def _not_served(self, call: str, instead: str) -> NoReturn:
        raise NotImplementedError(f"[engine.{call}] is not served by this version; {instead}")
