"""One batch of a stage, as the interpreter of schedules sees it (tessera/pipeline/run.h)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tessera import _core
from tessera._nested import Nesting
from tessera.errors import ConfigError
from tessera.pipeline._module import PipelineModule


class StageEngine(Protocol):
    """The engine that computes on a stage: a PipelineEngine."""

    @property
    def module(self) -> PipelineModule: ...
    @property
    def stage_id(self) -> int: ...
    def _run_chunk(self, inputs: Any, chunk: int, casts: bool) -> Any: ...
    def _backward_of_loss(self, loss: torch.Tensor) -> None: ...
    def _count_micro_batch(self) -> None: ...
    def join_thawed(self) -> None: ...
    def _step_of_all(self, copies: list[int]) -> None: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...


_VALUES = Nesting("pipeline", "a layer returned", "stages", "stage")


@dataclass
class Batch:
    """`data`: gives (inputs, labels) of so many micro-batches, on the first and the last stage. `trains`: every forward
    has a backward. What the core calls, it calls on the thread that runs the batch."""

    engine: StageEngine
    shape: _core.PipelineShape
    data: Callable[[int], Sequence[tuple[Any, Any]] | None] | None = None
    trains: bool = True
    needs_loss: bool = True
    keeps_outputs: bool = False
    outputs: list[Any] = field(
        default_factory=list
    )  # outputs of the last layer, by micro-batch: where asked, or without a loss

    _batches: Sequence[tuple[Any, Any]] | None = None

    def read(self, wanted: int) -> int:
        """As Stage in tessera/pipeline/stage.h, as all that follow."""
        assert self.data is not None
        self._batches = self.data(wanted)
        return -1 if self._batches is None else len(self._batches)

    def end_of_data(self) -> None:
        raise StopIteration

    def step(self, copies: list[int]) -> None:
        self.engine._step_of_all(copies)

    def forget_gradients(self) -> None:
        self.engine.zero_grad()

    def forward(
        self, chunk: int, micro: int, tensors: list[torch.Tensor], note: str
    ) -> tuple[list[torch.Tensor], str, torch.Tensor | None]:
        """(tensors, note) for the next part of the model; of the last part the loss, where there is one."""
        stage = self.engine.stage_id
        first = self.shape.is_first(stage, chunk)
        inputs = self._micro_batch(micro)[0] if first else _VALUES.join(note, tensors)
        made = self.engine._run_chunk(inputs, chunk, casts=first)
        if self.shape.is_last(stage, chunk):
            return [], "", self._loss_of(made, micro)
        return *_VALUES.split(made), None

    def _micro_batch(self, micro: int) -> tuple[Any, Any]:
        assert self._batches is not None
        return self._batches[micro]

    def _loss_of(self, outputs: Any, micro: int) -> torch.Tensor | None:
        if self.keeps_outputs:
            self.outputs.append(outputs)
        if not self.needs_loss:
            return None
        loss_fn = self.engine.module.loss_fn
        loss = outputs if loss_fn is None else loss_fn(outputs, self._micro_batch(micro)[1])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            if loss_fn is None and not self.trains:  # the model has no loss
                self.outputs += [] if self.keeps_outputs else [outputs]
                return None
            who = "the last layer" if loss_fn is None else "loss_fn"
            what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            hint = "; PipelineModule(loss_fn=...) takes what makes one of outputs and labels" if loss_fn is None else ""
            raise ConfigError(f"[pipeline] the loss must be a tensor of one element, {who} returned {what}{hint}")
        return loss

    def backward_of_loss(self, loss: torch.Tensor) -> None:
        self.engine._backward_of_loss(loss)

    def backward(self, outputs: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        torch.autograd.backward(outputs, gradients)

    def count_micro_batch(self) -> None:
        self.engine._count_micro_batch()

    def join(self) -> None:
        self.engine.join_thawed()
