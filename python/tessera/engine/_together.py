"""Several engines that step as one: one norm to clip by, skipped together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tessera import _core, _mesh
from tessera._device import group_device
from tessera.engine._engine import Engine
from tessera.engine._look import fault_text
from tessera.engine.front import engine_behind
from tessera.errors import ConfigError, UsageError


def step_together(
    engines: Engine | Iterable[Engine], group: _mesh.OneGroup | None = None, *, copies: Iterable[torch.Tensor] = ()
) -> float | None:
    """Calls step() of every engine; at an accumulation boundary all clip by the norm of all their gradients, and a
    gradient that is not finite in one of them skips the step of all, so that loss scales move alike. Returns the norm,
    None between boundaries.

    `engines`: those of this process. `group`: all processes that hold any of the engines (a torch ProcessGroup or a
    group of tessera), each of which passes its own, none or several; without it, every rank of one engine holds them
    all. `copies`: parameters of these engines that another engine has too, with the same gradient, and counts; with a
    group. Errors, on every process and with nothing stepped, where only some are at a boundary, one rank cannot step
    one of them, or the ranks of one differ in what they step by, as engine.step() compares it. An engine's own error
    of a step ("already at minimum") is raised when all have stepped. Collective.
    """
    mine = [engine_behind(engine) for engine in ([engines] if isinstance(engines, nn.Module) else engines)]
    copies = list(copies)
    if copies and group is None:
        raise ConfigError("[step_together] copies are counted elsewhere; pass the group of all processes")
    found = Found()
    members = [Member(engine, copies, found) for engine in mine]
    try:
        return _core.step_together(members, None if group is None else _mesh.core_group(group), _device(mine, group))
    finally:
        for engine in mine:
            engine._look.looked = None


def _device(engines: list[Engine], group: Any) -> torch.device:
    """The device of what the processes exchange."""
    if isinstance(group, dist.ProcessGroup):
        return group_device(group) or torch.device("cpu")
    return engines[0].device if engines else torch.device("cpu")


@dataclass
class Found:
    """The first thing that keeps one of the engines from its step; the others are not to step then."""

    fault: str = ""
    problem: Exception | None = None


@dataclass
class Member:
    """An engine as tessera/pipeline/together.h asks it."""

    engine: Engine
    copies: list[torch.Tensor]
    found: Found

    def at_boundary(self) -> bool:
        self.engine._updates.trained_by("step")
        return self.engine._accumulation.at_boundary()

    def check(self, at_boundary: bool) -> None:
        look, found = self.engine._look, self.found
        if at_boundary:
            found.fault, found.problem = look.look(before_step=not look.in_backward)
        try:
            if found.fault:
                raise found.problem or UsageError(f"[step_together] {found.fault}")
            self.engine.core.check_step()
        except Exception as error:
            found.fault, found.problem = fault_text(error), error
            raise

    def checked(self) -> None:
        self.engine._look.looked = self.found.fault, self.found.problem

    def square(self, whole: bool) -> float:
        engine = self.engine
        if whole:
            return float(engine.grad_norm() ** 2)
        return engine.norm_contribution([param for param in self.copies if engine._updates.optimizes(param)])

    def step(self, norm: float | None) -> bool:
        self.engine.step(global_norm=norm)
        return self.engine.was_step_applied()
