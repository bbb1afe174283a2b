"""The program that an engine is a part of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tessera.engine._updates import Updates

__all__ = ["Names", "Program", "check_trains", "engine_class"]

Names = list[list[tuple[str, bool]]]  # by param group: names, and whether each is trained


@functools.singledispatch
def engine_class(model: object) -> Callable[..., Any] | None:
    """What initialize() builds of a model of this class; None: Engine. Who has another engine for a class of models
    registers it here."""
    return None


class Program:
    """The calls by which an engine asks the program that it is a part of; here the engine is all of it. A program of
    several engines derives a class and passes an object of it (Engine(program=...))."""

    of_several = False  # checkpoints are of several engines: engine/checkpoint.h

    def speaks(self) -> bool:
        """Whether this engine logs warnings and progress."""
        return True

    def optimizer_made(self, base: torch.optim.Optimizer | None, given: list[int]) -> None:
        """Errors refuse it: nothing of the module has changed. `given`: how many parameters each param group was given.
        Collective."""

    def buildable(self) -> None:
        """Called before what is collective inside an engine: errors of others end it here. Collective."""

    def casts_inputs(self) -> bool:
        """Whether the inputs of the forward that begins are the program's own, which fp16.auto_cast casts."""
        return True

    def device(self) -> torch.device | None:
        """The device of an engine whose module has no parameters."""
        return None

    def group_names(self, own: Names) -> Names:
        """The names of param groups that a checkpoint has. Collective."""
        return own


class _Trained(Protocol):
    @property
    def _updates(self) -> Updates: ...


def check_trains(engine: _Trained, call: str) -> None:
    """UsageError of engine.`call` for an engine without an optimizer, and for one that was destroyed. Local."""
    engine._updates.trained_by(call)
