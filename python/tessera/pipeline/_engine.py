"""PipelineEngine: the engine of one stage, and the batches that all stages train together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from tessera import _core, _mesh
from tessera._config import load_config
from tessera.engine import Engine, step_together
from tessera.engine._together import Over
from tessera.errors import UsageError
from tessera.pipeline._checks import Optimizer, check, check_alike, check_optimizers
from tessera.pipeline._data import Feed
from tessera.pipeline._grid import Grid
from tessera.pipeline._module import PipelineModule, units_of_layers
from tessera.pipeline._run import Run, Wires
from tessera.pipeline._schedule import Shape, forward_only, training
from tessera.pipeline._ties import Ties
from tessera.pipeline._wire import StageFailed
from tessera.units import UnitPolicy


class PipelineEngine(Engine):
    """Trains a PipelineModule: tessera.initialize(model=PipelineModule(...)) builds one.

    loss = engine.train_batch(data_iter)  # gradient_accumulation_steps micro-batches through all stages, and a step

    Every stage is an engine over its ranks (ZeRO 0 to 2, any precision, tensor and sequence parallelism inside). The
    loss is the mean over micro-batches and data-parallel ranks, on all stages; gradients are clipped by the norm of all
    stages, which skip a step together. All calls are collective over all processes. See docs/pipeline.md.
    """

    _of_several = True
    module: PipelineModule

    def __init__(
        self,
        model: nn.Module,
        config: Any,
        *,
        group: Any = None,
        unit_policy: UnitPolicy | None = None,
        sequence_parallel: int | None = None,
        tensor_parallel: int | None = None,
        **kwargs: Any,
    ) -> None:
        loaded = load_config(config)
        self._everyone = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
        with self._told():
            check(model, loaded, group)
        assert isinstance(model, PipelineModule)
        sizes = _mesh.mesh_sizes(loaded) | {
            axis: size for axis, size in (("sp", sequence_parallel), ("tp", tensor_parallel)) if size is not None
        }
        self._broken = self._inside = ""
        self._under_way = False  # messages of a batch
        self.max_live_activations = 0
        self._grid = Grid(model.num_stages, **sizes)
        try:
            check_alike(model, loaded)
            self._ties = Ties(model, self._grid)
            with self._told():
                self._ties.check(loaded)
            self._ties.share_values()
            if not isinstance(self._grid.stage_ranks, (dist.ProcessGroup, type(None))) and self._grid.device:
                model.to(self._grid.device)
            with self._told():
                super().__init__(
                    model,
                    config,
                    group=self._grid.stage_ranks,
                    unit_policy=unit_policy or units_of_layers,
                    sequence_parallel=sequence_parallel,
                    tensor_parallel=tensor_parallel,
                    **kwargs,
                )
            self._connect()
        except BaseException:
            _mesh.discard(self._grid.groups)
            raise

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """A part of the construction that stages do each for themselves: an error of one is one of all. Collective."""
        try:
            yield
        except (dist.DistBackendError, StageFailed):
            raise
        except Exception as error:
            self._agree(error)
            raise
        self._agree()

    def _agree(self, problem: Exception | None = None) -> None:
        if self._everyone is None:
            return
        texts = self._of_all("" if problem is None else self._said_of(problem, "while it was built"))
        if problem is None and any(texts):
            raise StageFailed(next(filter(None, texts)))

    def _of_all(self, own: Any) -> list[Any]:
        """What each rank passes, in the order of ranks."""
        everyone = [own]
        if self._everyone is not None:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, own, self._everyone)
        return everyone

    def _check_optimizer(self, base: torch.optim.Optimizer | None) -> None:
        self._agree()
        check_optimizers(self._of_all(Optimizer.of(base)), self._grid.name)
        super()._check_optimizer(base)

    def _build_core(self, base: torch.optim.Optimizer | None, policy: UnitPolicy) -> None:
        self._agree()  # that it can be built: what comes is collective inside a stage
        if not any(True for _ in self.module.parameters()) and self._grid.device is not None:
            self.device = self._grid.device  # functions have none of their own
        super()._build_core(base, policy)

    def _connect(self) -> None:
        interval = self._settings.get("pipeline.activation_checkpoint_interval")
        if interval and not self.module.activation_checkpoint_interval:
            self.module.activation_checkpoint_interval = interval
        self._casts_to = self._input_dtype
        self._over = Over([self], self._everyone)
        self._feed = Feed(self, self._grid, self._over)
        self._wires = Wires.of(self._grid, self.module.num_chunks, self.device)
        self._ties.attach(self)
        if self._over.group is not None:
            copies = [self._index[id(param)] for param in self._ties.copies if id(param) in self._index]
            _core.span_checkpoints(self.core, self._over.group, copies)

    # ---------------------------------------------------------------- what and where

    @property
    def stage_id(self) -> int:
        return self._grid.stage

    @property
    def num_stages(self) -> int:
        return self._grid.stages

    @property
    def micro_batches(self) -> int:
        """Of one train_batch()."""
        return self.gradient_accumulation_steps()

    def is_first_stage(self) -> bool:
        return self._grid.stage == 0

    def is_last_stage(self) -> bool:
        return self._grid.stage == self._grid.stages - 1

    def _shape(self, micro_batches: int) -> Shape:
        return Shape(self._grid.stages, micro_batches, self.module.num_chunks)

    # ---------------------------------------------------------------- batches

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One optimizer step. Returns the mean loss, a scalar in fp32, on every rank.

        `data_iter` yields a micro-batch (inputs, labels); the first and the last stage read gradient_accumulation_steps
        of them, the same ones, others may pass None. Default: the training_data of initialize(), over and over. An
        iterator that has nothing left is a StopIteration, one that ends inside the batch a UsageError, on all ranks.
        """
        self._check_usable("train_batch")
        self._trainable("train_batch")
        shape = self._shape(self.micro_batches)
        table = training(self._settings.get("pipeline.schedule"), shape, self._grid.stage)
        self._ties.follow(self)
        batches = self._feed.read(data_iter, shape.micro_batches)
        self.train()
        run = Run(self, self._wires, shape, self._grid.stage, batches, trains=True)
        with self._in_batch("train_batch"):
            loss = self._execute(run, table)
            self.max_live_activations = max(self.max_live_activations, run.most_live)
            try:
                self._ties.sum_gradients(self)
                step_together(self, self._everyone, copies=self._ties.copies)
            except BaseException:
                self.zero_grad()  # the next batch is not added to this one
                raise
        assert loss is not None
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The mean loss of micro-batches as train_batch() reads them, without gradients and in eval mode; on every
        rank.

        `return_logits`: (loss, outputs), a list of what the last layer returned for each micro-batch; None on other
        stages. `compute_loss=False`: those outputs alone; so it is, with None for the loss, without a loss_fn where the
        last layer does not return one, a tensor of one element. `bcast_loss` is DeepSpeed's; the loss is on all ranks.
        """
        self._check_usable("eval_batch")
        if reduce_output not in ("avg", None):
            raise NotImplementedError(f"[engine.eval_batch] reduce_output {reduce_output!r} is not served; use 'avg'")
        shape = self._shape(num_micro_batches or self.micro_batches)
        batches = self._feed.read(data_iter, shape.micro_batches)
        modes = [(module, module.training) for module in self.module.modules()]
        self.eval()
        run = Run(self, self._wires, shape, self._grid.stage, batches, trains=False, needs_loss=compute_loss)
        try:
            with self._in_batch("eval_batch"), torch.no_grad():
                loss = self._execute(run, forward_only(shape, self._grid.stage))
        finally:
            for module, training in modes:
                module.training = training
        outputs = run.outputs if self.is_last_stage() else None
        if not compute_loss:
            return outputs
        if return_logits:
            return loss, outputs
        return outputs if loss is None else loss

    def _execute(self, run: Run, table: Any) -> torch.Tensor | None:
        """Runs the table; the mean loss of all ranks of the last stage, None where they compute none. An error of any
        rank is one of all."""
        problem: Exception | None = None
        self._under_way = True
        try:
            run.execute(table)
        except dist.DistBackendError:
            raise
        except Exception as error:
            problem = error
        total = torch.zeros((), device=self.device)
        for loss in run.losses:
            total = total + loss.reshape(())
        mean = float(total / max(1, len(run.losses)))
        rows = self._over.rows([problem is not None, bool(run.losses), mean]).tolist()
        if any(failed for failed, _, _ in rows):
            self._share_failure(problem)
        for wire in self._wires.outgoing():
            wire.flush()
        self._under_way = False
        losses = [loss for _, has_loss, loss in rows if has_loss]
        if not losses:
            return None
        return torch.tensor(sum(losses) / len(losses), dtype=torch.float32, device=self.device)

    def _share_failure(self, problem: Exception | None) -> NoReturn:
        """Some rank could not go on: its error there, and what it said on all others."""
        own = None if isinstance(problem, StageFailed) else problem
        texts = self._of_all("" if own is None else self._said_of(own))
        if own is not None:
            raise own
        raise StageFailed(next((text for text in texts if text), "[pipeline] a stage failed in this batch"))

    def _said_of(self, error: Exception, when: str = "in this batch") -> str:
        where = self._grid.name() if "_grid" in self.__dict__ else f"rank {dist.get_rank()}"
        return f"[pipeline] {where} failed {when}: {type(error).__name__}: {error}"

    # ---------------------------------------------------------------- what a Run calls

    def _run_chunk(self, inputs: Any, chunk: int, casts: bool) -> Any:
        self._input_dtype = self._casts_to if casts else None
        return super().forward(inputs, chunk=chunk)

    def _begin_backward(self, is_last: bool) -> None:
        self.core.set_gradient_accumulation_boundary(is_last)

    def _count_micro_batch(self) -> None:
        super().step()

    def _backward_of_loss(self, loss: torch.Tensor) -> None:
        super().backward(loss)

    def _backward_of(self, outputs: list[torch.Tensor], gradients: list[torch.Tensor | None]) -> None:
        """Of a part that is not the last: what the next one has found. It carries the loss scale, which is the same on
        all stages; scale() multiplies by it, so that it is divided out before, in fp32."""
        roots, given = [], []
        scale = self.loss_scaler.loss_scale if self.loss_scaler.needed else None
        for output, gradient in zip((o for o in outputs if o.requires_grad), gradients, strict=True):
            if gradient is None:
                continue
            if scale is not None and output.grad_fn is not None:
                output, gradient = self.scale(output), gradient.float() / scale
            roots.append(output)
            given.append(gradient)
        if roots:
            torch.autograd.backward(roots, given)

    # ---------------------------------------------------------------- calls at the wrong moment

    @contextlib.contextmanager
    def _in_batch(self, call: str) -> Iterator[None]:
        self._inside = call
        try:
            yield
        except BaseException as error:
            # Messages of the batch may be on their way still, and other stages have other gradients.
            if self._under_way or isinstance(error, dist.DistBackendError):
                self._broken = f"{type(error).__name__}: {error}".splitlines()[0]
            raise
        finally:
            self._inside = ""

    def _check_usable(self, call: str) -> None:
        if self._broken:
            raise UsageError(
                f"[engine.{call}] a batch has failed before ({self._broken}): stages are not at the same place any "
                "more; build a new engine and load a checkpoint"
            )
        if self._inside:
            raise UsageError(f"[engine.{call}] inside {self._inside}()")

    def _only_whole(self, call: str) -> NoReturn:
        raise UsageError(
            f"[engine.{call}] a pipeline's engine trains by train_batch() and evaluates by eval_batch(): one stage "
            "alone cannot go forward, back or step"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._only_whole("forward")

    def backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._only_whole("backward")

    def step(self, lr_kwargs: dict[str, Any] | None = None, *, global_norm: float | None = None) -> None:
        if not self._inside:
            self._only_whole("step")
        super().step(lr_kwargs, global_norm=global_norm)

    def no_sync(self) -> Any:
        self._only_whole("no_sync")

    def coalesce_grad_reduction(self) -> Any:
        self._only_whole("coalesce_grad_reduction")

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._only_whole("set_gradient_accumulation_boundary")

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._not_served("save_16bit_model", "save_checkpoint() and `tessera export` write the weights of all stages")

    # ---------------------------------------------------------------- the rest

    def _warn(self, lines: list[str]) -> None:
        if self._grid.stage == 0:
            super()._warn(lines)

    def _telling_rank(self) -> int:
        return super()._telling_rank() if self._grid.stage == 0 else 1

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> bool:
        if self._settings.get("checkpoint.format") == "deepspeed":
            self._not_served('save_checkpoint with checkpoint.format "deepspeed"', 'use the format "tessera"')
        self._join()  # it writes to the names of this stage
        own, self._group_names = self._group_names, self._names_of_all()
        try:
            return super().save_checkpoint(*args, **kwargs)
        finally:
            self._group_names = own

    def _names_of_all(self) -> list[list[tuple[str, bool]]]:
        """By param group: the names of all stages, each once."""
        everyone = self._of_all(self._group_names)
        return [list(dict.fromkeys(name for names in same for name in names)) for same in zip(*everyone, strict=True)]

    def destroy(self) -> None:
        super().destroy()
        self.__dict__.pop("_over", None)
        self.__dict__.pop("_feed", None)
        _mesh.discard(self._grid.groups)
