"""The interpreter: one batch of a pipeline, action by action."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from tessera.errors import ConfigError, UsageError
from tessera.pipeline._grid import Grid
from tessera.pipeline._schedule import Action, Shape
from tessera.pipeline._wire import StageFailed, Wire, tensors_of

if TYPE_CHECKING:
    from tessera.pipeline._engine import PipelineEngine

Place = tuple[int, int]  # chunk, micro-batch


@dataclass
class Wires:
    """Of one stage, by chunk; None where a chunk has no neighbour."""

    activations_in: list[Wire | None]
    activations_out: list[Wire | None]
    gradients_in: list[Wire | None]
    gradients_out: list[Wire | None]

    @classmethod
    def of(cls, grid: Grid, chunks: int, device: torch.device) -> Wires:
        shape = Shape(grid.stages, 1, chunks)

        def some(group: str, step: int, what: str) -> list[Wire | None]:
            is_end = shape.is_first if step < 0 else shape.is_last
            return [
                None
                if is_end(grid.stage, chunk)
                else Wire(getattr(grid, group), grid.peer(grid.stage + step), device, what)
                for chunk in range(chunks)
            ]

        return cls(
            activations_in=some("forwards", -1, "activations"),
            activations_out=some("forwards", 1, "activations"),
            gradients_in=some("backwards", 1, "gradients"),
            gradients_out=some("backwards", -1, "gradients"),
        )

    def outgoing(self) -> list[Wire]:
        return [wire for wire in (*self.activations_out, *self.gradients_out) if wire is not None]


class _Received(torch.autograd.Function):
    """A message's tensor as the result of an operation, so that the layer may work in place on it; the leaf, whose
    gradient goes back, stays what it is."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _received(value: Any) -> Any:
    needs = isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled()
    return _Received.apply(value) if needs else value


@dataclass
class Live:
    """What a forward leaves for its backward."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


@dataclass
class Run:
    """`batches`: (inputs, labels) of every micro-batch, on the first and the last stage. With `trains` the graphs of
    forwards are kept and every backward counts."""

    engine: PipelineEngine
    wires: Wires
    shape: Shape
    stage: int
    batches: Sequence[tuple[Any, Any]] | None
    trains: bool
    needs_loss: bool = True
    losses: list[torch.Tensor] = field(default_factory=list)
    outputs: list[Any] = field(
        default_factory=list
    )  # of the last stage, where the loss is not computed or both are asked
    most_live: int = 0

    def __post_init__(self) -> None:
        self._inputs: dict[Place, Any] = {}
        self._made: dict[Place, Any] = {}
        self._live: dict[Place, Live] = {}
        self._gradients: dict[Place, list[torch.Tensor | None]] = {}
        self._backwards_left = self.shape.micro_batches * self.shape.chunks if self.trains else 0
        self._do = {
            "receive activations": self._receive_activations,
            "forward": self._forward,
            "send activations": self._send_activations,
            "receive gradients": self._receive_gradients,
            "backward": self._backward,
            "send gradients": self._send_gradients,
        }

    def execute(self, table: Sequence[Action]) -> None:
        """An error of this stage is told to its neighbours, which end the batch with it; that of a lost one is not."""
        try:
            for action in table:
                self._do[action.kind](action.chunk, action.micro)
        except dist.DistBackendError:
            raise
        except Exception as error:
            text = str(error) if isinstance(error, StageFailed) else self.engine._said_of(error)
            for wire in self.wires.outgoing():
                wire.send_failure(text)
            raise

    def _number(self, part: int, micro: int) -> int:
        """Of a message over the boundary behind `part`."""
        return part * self.shape.micro_batches + micro

    def _part(self, chunk: int) -> int:
        return chunk * self.shape.stages + self.stage

    # ---------------------------------------------------------------- forward

    def _receive_activations(self, chunk: int, micro: int) -> None:
        wire = self.wires.activations_in[chunk]
        assert wire is not None
        self._inputs[chunk, micro] = wire.receive(self._number(self._part(chunk) - 1, micro))

    def _forward(self, chunk: int, micro: int) -> None:
        first, last = self.shape.is_first(self.stage, chunk), self.shape.is_last(self.stage, chunk)
        inputs = self._batch(micro)[0] if first else self._inputs.pop((chunk, micro))
        made = self.engine._run_chunk(inputs if first else tree_map(_received, inputs), chunk, casts=first)
        if last:
            made = self._loss_of(made, micro)
        else:
            self._made[chunk, micro] = made
        if self.trains:
            leaves = [] if first else [leaf for leaf in tensors_of(inputs) if leaf.requires_grad]
            self._live[chunk, micro] = Live(leaves, [made] if last else tensors_of(made))
            self.most_live = max(self.most_live, len(self._live))

    def _batch(self, micro: int) -> tuple[Any, Any]:
        assert self.batches is not None
        return self.batches[micro]

    def _loss_of(self, outputs: Any, micro: int) -> Any:
        if not self.trains:
            self.outputs.append(outputs)
        if not self.needs_loss:
            return outputs
        loss_fn = self.engine.module.loss_fn
        loss = outputs if loss_fn is None else loss_fn(outputs, self._batch(micro)[1])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            if loss_fn is None and not self.trains:
                return outputs  # of a model without a loss
            who = "the last layer" if loss_fn is None else "loss_fn"
            what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(f"[pipeline] the loss must be a tensor of one element, {who} returned {what}")
        self.losses.append(loss.detach().float())
        return loss

    def _send_activations(self, chunk: int, micro: int) -> None:
        wire = self.wires.activations_out[chunk]
        assert wire is not None
        wire.send(self._made.pop((chunk, micro)), self._number(self._part(chunk), micro))

    # ---------------------------------------------------------------- backward

    def _receive_gradients(self, chunk: int, micro: int) -> None:
        wire = self.wires.gradients_in[chunk]
        assert wire is not None
        self._gradients[chunk, micro] = wire.receive(self._number(self._part(chunk), micro))

    def _backward(self, chunk: int, micro: int) -> None:
        live = self._live.pop((chunk, micro))
        self._backwards_left -= 1
        self.engine._begin_backward(is_last=self._backwards_left == 0)
        try:
            if self.shape.is_last(self.stage, chunk):
                self.engine._backward_of_loss(live.outputs[0])
            else:
                self.engine._backward_of(live.outputs, self._gradients.pop((chunk, micro)))
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise UsageError(
                f"[pipeline] stage {self.stage}: the graph of micro-batch {micro} was freed before its backward; a "
                "layer, a hook or loss_fn has called backward() on it. The pipeline's engine calls it itself"
            ) from error
        if chunk == 0 and self._backwards_left:
            self.engine._count_micro_batch()
        self._gradients[chunk, micro] = [leaf.grad for leaf in live.inputs]

    def _send_gradients(self, chunk: int, micro: int) -> None:
        wire = self.wires.gradients_out[chunk]
        assert wire is not None
        wire.send(self._gradients.pop((chunk, micro)), self._number(self._part(chunk) - 1, micro))
