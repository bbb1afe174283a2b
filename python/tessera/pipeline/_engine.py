"""PipelineEngine: the engine of one stage, and the batches that all stages train together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import ParamsT
from torch.utils.data import Dataset

from tessera import _core, _mesh
from tessera._config import ConfigLike, load_config
from tessera.data import Collate, Indexed
from tessera.engine import Engine, step_together
from tessera.engine.front import Front
from tessera.engine.program import check_trains, engine_class
from tessera.errors import UsageError
from tessera.lr_schedules import Scheduler
from tessera.optim.engines import MakesOptimizer, MakesScheduler
from tessera.pipeline._batch import Batch
from tessera.pipeline._checks import check, check_alike, check_ties
from tessera.pipeline._data import Feed
from tessera.pipeline._grid import Everyone, Grid
from tessera.pipeline._module import PipelineModule, units_of_layers
from tessera.pipeline._stages import Stages
from tessera.sequence import SequenceParallelGroups
from tessera.units import UnitPolicy

Outputs = list[Any] | None  # of the last layer, by micro-batch; None on other stages
Method = TypeVar("Method", bound=Callable[..., Any])


def _of_all_stages(call: str) -> Callable[..., NoReturn]:
    """A method of engines that one stage alone cannot do."""

    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise UsageError(
            f"[engine.{call}] a pipeline's engine trains by train_batch() and evaluates by eval_batch(): one stage "
            "alone cannot go forward, back or step"
        )

    refuse.__name__, refuse.__doc__ = call, "UsageError: train_batch() and eval_batch() run all stages."
    return refuse


def _while_stages_live(method: Method) -> Method:
    """A method of engines that is refused where an earlier call of the pipeline has failed."""

    @functools.wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._checked(method.__name__)
        return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


class PipelineEngine(Engine):
    """Trains a PipelineModule: tessera.initialize(model=PipelineModule(...)) builds one.

    loss = engine.train_batch(data_iter)  # gradient_accumulation_steps micro-batches through all stages, and a step

    Every stage is an engine over its ranks (ZeRO 0 to 2, any precision, tensor and sequence parallelism inside). The
    loss is the mean over micro-batches and data-parallel ranks, on all stages; gradients are clipped by the norm of all
    stages, which skip a step together. All calls are collective over all processes. See docs/pipeline.md.
    """

    module: PipelineModule

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
    ) -> None:
        self._everyone = everyone = Everyone()
        self._stages = stages = Stages(everyone)
        try:
            with stages.agreeing():
                loaded = load_config(config)
                check(model, loaded, group)
                assert isinstance(model, PipelineModule)
                sizes = _mesh.mesh_sizes(loaded) | {
                    axis: size
                    for axis, size in (("sp", sequence_parallel), ("tp", tensor_parallel))
                    if size is not None
                }
                grid = Grid(everyone, model.num_stages, **sizes)
                stages.agree()
                check_alike(model, loaded, everyone)
                self._grid = grid
                stages.made(grid)
                check_ties(model, loaded)
                stages.agree()
                grid.connect(everyone)
                self._ties = _core.Ties(grid.ranks, grid.tied(model), stages.building)
                if not isinstance(grid.stage_ranks, (dist.ProcessGroup, type(None))) and grid.device:
                    model.to(grid.device)
                stages.agree()
                super().__init__(
                    model,
                    config,
                    group=grid.stage_ranks,
                    unit_policy=unit_policy or units_of_layers,
                    sequence_parallel=sequence_parallel,
                    tensor_parallel=tensor_parallel,
                    program=stages,
                    optimizer=optimizer,
                    model_parameters=model_parameters,
                    lr_scheduler=lr_scheduler,
                    training_data=training_data,
                    collate_fn=collate_fn,
                    front=front,
                )
                self._connect()
        except BaseException:
            if "core" in self.__dict__:
                Engine.destroy(self)
            if "_grid" in self.__dict__:
                _mesh.discard(self._grid.groups)
            raise

    def _connect(self) -> None:
        """Collective."""
        interval = self.config.pipeline.activation_checkpoint_interval
        if interval and not self.module.activation_checkpoint_interval:
            self.module.activation_checkpoint_interval = interval
        self._feed = Feed(self, self._grid)
        beside = [self.core.mesh().group(axes) for axes in self._grid.axes]
        chunks = self.module.num_chunks
        self._runner = _core.PipelineRunner(self._grid.ranks, self._ties, chunks, self.device, beside)
        batch = Batch(self, self._shape(1))
        self._stages.agree()
        self._ties.attach(self.core, batch)
        if self._everyone.size > 1:
            _core.span_checkpoints(self.core, self._everyone.group, self._ties.copies(self.core, batch))

    # ---------------------------------------------------------------- what and where

    @property
    def stage_id(self) -> int:
        """The number of this rank's stage, from 0."""
        return self._grid.stage

    @property
    def num_stages(self) -> int:
        """How many stages the model is dealt out to."""
        return self._grid.stages

    @property
    def micro_batches(self) -> int:
        """How many micro-batches one train_batch() takes."""
        return self.gradient_accumulation_steps()

    @property
    def max_live_activations(self) -> int:
        """The most micro-batches (times chunks) whose activations this stage has held."""
        return self._calls("max_live_activations").most_live

    def is_first_stage(self) -> bool:
        """Whether this rank's stage takes the inputs."""
        return self._grid.stage == 0

    def is_last_stage(self) -> bool:
        """Whether this rank's stage computes the loss."""
        return self._grid.stage == self._grid.stages - 1

    def _shape(self, micro_batches: int) -> _core.PipelineShape:
        return _core.PipelineShape(self._grid.stages, micro_batches, self.module.num_chunks)

    # ---------------------------------------------------------------- batches

    def train_batch(self, data_iter: Iterator[object] | None = None) -> torch.Tensor:
        """One optimizer step. Returns the mean loss, a scalar in fp32, on every rank.

        `data_iter` yields a micro-batch (inputs, labels); the first and the last stage read gradient_accumulation_steps
        of them, the same ones, others may pass None. Default: the training_data of initialize(), over and over. An
        iterator that has nothing left is a StopIteration, one that ends inside the batch a UsageError, on all ranks.
        """
        check_trains(self, "train_batch")
        shape = self._shape(self.micro_batches)
        table = _core.training_table(self.config.pipeline.schedule, shape, self._grid.stage)
        runner = self._checked("train_batch")
        batch = Batch(self, shape, functools.partial(self._feed.read, data_iter))
        self.train()
        loss = self._loss(runner.train_batch(self.core, batch, table, shape))
        assert loss is not None
        return loss

    @overload
    def eval_batch(
        self,
        data_iter: Iterator[object],
        return_logits: Literal[False] = False,
        compute_loss: Literal[True] = True,
        reduce_output: str | None = "avg",
        num_micro_batches: int | None = None,
    ) -> torch.Tensor: ...
    @overload
    def eval_batch(
        self,
        data_iter: Iterator[object],
        return_logits: Literal[True],
        compute_loss: Literal[True] = True,
        reduce_output: str | None = "avg",
        num_micro_batches: int | None = None,
    ) -> tuple[torch.Tensor | None, Outputs]: ...
    @overload
    def eval_batch(
        self,
        data_iter: Iterator[object],
        return_logits: bool = False,
        *,
        compute_loss: Literal[False],
        reduce_output: str | None = "avg",
        num_micro_batches: int | None = None,
    ) -> Outputs: ...
    def eval_batch(
        self,
        data_iter: Iterator[object],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        num_micro_batches: int | None = None,
    ) -> torch.Tensor | Outputs | tuple[torch.Tensor | None, Outputs]:
        """The mean loss of micro-batches as train_batch() reads them, without gradients and in eval mode; on every
        rank.

        `return_logits`: (loss, outputs), a list of what the last layer returned for each micro-batch; None on other
        stages. `compute_loss=False`: those outputs alone; so it is, with None for the loss, without a loss_fn where the
        last layer does not return one, a tensor of one element.
        """
        if reduce_output not in ("avg", None):
            raise NotImplementedError(f"[engine.eval_batch] reduce_output {reduce_output!r} is not served; use 'avg'")
        shape = self._shape(num_micro_batches or self.micro_batches)
        runner = self._checked("eval_batch")
        data, keeps = functools.partial(self._feed.read, data_iter), return_logits or not compute_loss
        batch = Batch(self, shape, data, trains=False, needs_loss=compute_loss, keeps_outputs=keeps)
        modes = [(module, module.training) for module in self.module.modules()]
        self.eval()
        try:
            with torch.no_grad():
                table = _core.forward_table(shape, self._grid.stage)
                loss = self._loss(runner.eval_batch(self.core, batch, table, shape))
        finally:
            for module, training in modes:
                module.training = training
        outputs = batch.outputs if self.is_last_stage() else None
        if not compute_loss:
            return outputs
        if return_logits:
            return loss, outputs
        return outputs if loss is None else loss

    def _loss(self, mean: float | None) -> torch.Tensor | None:
        return None if mean is None else torch.tensor(mean, dtype=torch.float32, device=self.device)

    # ---------------------------------------------------------------- what a Batch calls

    def _run_chunk(self, inputs: Any, chunk: int, casts: bool) -> Any:
        self._stages.own_inputs = casts
        return super().forward(inputs, chunk=chunk)

    def _count_micro_batch(self) -> None:
        super().step()

    def _backward_of_loss(self, loss: torch.Tensor) -> None:
        super().backward(loss)

    def _step_of_all(self, copies: list[int]) -> None:
        held = [self.core.param(number).tensor for number in copies]
        step_together(self, self._everyone.processes, copies=held)

    # ---------------------------------------------------------------- calls at the wrong moment

    def _checked(self, call: str) -> _core.PipelineRunner:
        """Note [A call that failed] in tessera/pipeline/runner.h."""
        runner = self._calls(call)
        runner.check(call)
        if call == "save_16bit_model":
            self._check_one_stage(call)
        if call == "save_checkpoint" and self.config.checkpoint.format == "deepspeed":
            self._check_one_stage('save_checkpoint with checkpoint.format "deepspeed"')
        return runner

    def _calls(self, call: str) -> _core.PipelineRunner:
        runner: _core.PipelineRunner | None = self.__dict__.get("_runner")
        if runner is None:
            raise UsageError(f"[engine.{call}] the engine was destroyed; build a new one")
        return runner

    forward, backward = _of_all_stages("forward"), _of_all_stages("backward")
    no_sync, coalesce_grad_reduction = _of_all_stages("no_sync"), _of_all_stages("coalesce_grad_reduction")
    set_gradient_accumulation_boundary = _of_all_stages("set_gradient_accumulation_boundary")

    def step(self, lr_kwargs: dict[str, Any] | None = None, *, global_norm: float | None = None) -> None:
        if not self._calls("step").call:
            _of_all_stages("step")(self)
        super().step(lr_kwargs, global_norm=global_norm)

    def _check_one_stage(self, call: str) -> None:
        """What writes the whole model's weights into files of others."""
        _core.check_one_stage(call, self._grid.stages)

    # ---------------------------------------------------------------- the rest

    save_16bit_model = _while_stages_live(Engine.save_16bit_model)
    save_checkpoint = _while_stages_live(Engine.save_checkpoint)
    load_checkpoint = _while_stages_live(Engine.load_checkpoint)

    def pipe_group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks that are at one place of their stages; None with one stage."""
        return self._grid.forwards if self._grid.stages > 1 else None

    def destroy(self) -> None:
        super().destroy()
        if "_runner" in self.__dict__:  # else the construction has failed, and everyone is still to agree on that
            self._stages.end()
            for held in ("_feed", "_ties", "_everyone", "_runner", "_stages"):  # process groups
                del self.__dict__[held]
        self._grid.forget()
        _mesh.discard(self._grid.groups)


engine_class.register(PipelineModule, lambda model: PipelineEngine)
