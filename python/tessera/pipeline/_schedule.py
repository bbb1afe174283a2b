"""Schedules: for every stage the order in which it receives, computes and sends, as a table of actions.

A pipeline of `stages` ranks whose model is cut into `stages * chunks` parts: part p is chunk p // stages of stage
p % stages. Every micro-batch goes forward through all parts and backward through them; a schedule is the order of that
on one stage. Tables of different stages fit together: what one sends comes in the order in which the other receives it,
so that sends which nobody waits for cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tessera.errors import ConfigError

Kind = Literal["receive activations", "forward", "send activations", "receive gradients", "backward", "send gradients"]
SCHEDULES = ("1f1b", "gpipe", "interleaved")


@dataclass(frozen=True)
class Action:
    kind: Kind
    micro: int
    chunk: int = 0


@dataclass(frozen=True)
class Shape:
    """Of a pipeline."""

    stages: int
    micro_batches: int
    chunks: int = 1

    def is_first(self, stage: int, chunk: int) -> bool:
        return stage == 0 and chunk == 0

    def is_last(self, stage: int, chunk: int) -> bool:
        return stage == self.stages - 1 and chunk == self.chunks - 1


def training(name: str, shape: Shape, stage: int) -> list[Action]:
    """The table of one stage for one optimizer step. ConfigError for what the schedule cannot do."""
    if name not in SCHEDULES:
        raise ConfigError(f"[pipeline] there is no schedule {name!r}; use one of {', '.join(SCHEDULES)}")
    if shape.chunks > 1 and name != "gpipe":
        return list(_with_transfers(_interleaved(shape, stage), shape, stage))
    if name == "interleaved":
        raise ConfigError("[pipeline] the interleaved schedule needs PipelineModule(num_chunks=...) of 2 at least")
    return list(_with_transfers(_gpipe(shape) if name == "gpipe" else _one_f_one_b(shape, stage), shape, stage))


def forward_only(shape: Shape, stage: int) -> list[Action]:
    """The table of one stage for an evaluation."""
    return list(_with_transfers(_forwards(shape), shape, stage))


def live_bound(name: str, shape: Shape, stage: int) -> int:
    """The most micro-batches (times chunks) whose activations a stage holds at one time."""
    if name == "gpipe":
        return shape.micro_batches * shape.chunks
    if shape.chunks > 1:
        return min(_warm_up(shape, stage) + 1, shape.micro_batches * shape.chunks)
    return min(shape.stages - stage, shape.micro_batches)


def _forwards(shape: Shape) -> Iterator[Action]:
    """Rounds of `stages` micro-batches, each round through one chunk after the other, so that no stage waits long."""
    for begin in range(0, shape.micro_batches, shape.stages):
        micros = range(begin, min(begin + shape.stages, shape.micro_batches))
        yield from (Action("forward", micro, chunk) for chunk in range(shape.chunks) for micro in micros)


def _backwards(shape: Shape) -> Iterator[Action]:
    """As _forwards(), the last chunk first. Micro-batches ascend: gradients add up as without a pipeline."""
    for action in _forwards(shape):
        yield Action("backward", action.micro, shape.chunks - 1 - action.chunk)


def _gpipe(shape: Shape) -> Iterator[Action]:
    yield from _forwards(shape)
    yield from _backwards(shape)


def _one_f_one_b(shape: Shape, stage: int) -> Iterator[Action]:
    return _alternating(shape, min(shape.stages - stage - 1, shape.micro_batches))


def _warm_up(shape: Shape, stage: int) -> int:
    """Forwards before the first backward: the way to the end of the pipeline and back, and all chunks but the last."""
    ahead = 2 * (shape.stages - stage - 1) + (shape.chunks - 1) * shape.stages
    return min(ahead, shape.micro_batches * shape.chunks)


def _interleaved(shape: Shape, stage: int) -> Iterator[Action]:
    if shape.micro_batches % shape.stages:
        raise ConfigError(
            "[pipeline] the interleaved schedule goes in rounds of as many micro-batches as there are stages: "
            f"gradient_accumulation_steps ({shape.micro_batches}) must be a multiple of {shape.stages}; use another "
            'number, or "pipeline": {"schedule": "gpipe"}'
        )
    return _alternating(shape, _warm_up(shape, stage))


def _alternating(shape: Shape, warm_up: int) -> Iterator[Action]:
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards that are left."""
    forwards, backwards = _forwards(shape), _backwards(shape)
    for _ in range(warm_up):
        yield next(forwards)
    for forward in forwards:
        yield forward
        yield next(backwards)
    yield from backwards


def _with_transfers(actions: Iterator[Action], shape: Shape, stage: int) -> Iterator[Action]:
    for action in actions:
        micro, chunk = action.micro, action.chunk
        first, last = shape.is_first(stage, chunk), shape.is_last(stage, chunk)
        if action.kind == "forward":
            if not first:
                yield Action("receive activations", micro, chunk)
            yield action
            if not last:
                yield Action("send activations", micro, chunk)
        else:
            if not last:
                yield Action("receive gradients", micro, chunk)
            yield action
            if not first:
                yield Action("send gradients", micro, chunk)
