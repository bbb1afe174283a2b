"""Several engines that step as one: one norm to clip by, skipped together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tessera import _mesh
from tessera._device import group_device
from tessera.engine._engine import Engine
from tessera.engine._look import fault_text
from tessera.errors import ConfigError, UsageError


def step_together(
    engines: Engine | Iterable[Engine], group: Any = None, *, copies: Iterable[nn.Parameter] = ()
) -> float | None:
    """step() of every engine; at an accumulation boundary all clip by the norm of all their gradients, and a gradient
    that is not finite in one of them skips the step of all, so that loss scales move alike. Returns the norm, None
    between boundaries.

    `engines`: those of this process. `group`: all processes that hold any of the engines (a torch ProcessGroup or a
    group of tessera), each of which passes its own, none or several; without it, every rank of one engine holds them
    all. `copies`: parameters of these engines that another engine has too, with the same gradient, and counts; with a
    group. Errors, on every process and with nothing stepped, where only some are at a boundary, one rank cannot step
    one of them, or the ranks of one differ in what they step by, as engine.step() compares it. An engine's own error
    of a step ("already at minimum") is raised when all have stepped. Collective.
    """
    mine = [engines] if isinstance(engines, nn.Module) else list(engines)
    if len({id(engine) for engine in mine}) != len(mine):
        raise ConfigError("[step_together] an engine is named twice; pass each once")
    copies = list(copies)
    if copies and group is None:
        raise ConfigError("[step_together] copies are counted elsewhere; pass the group of all processes")
    if not mine and group is None:
        raise ConfigError("[step_together] there are no engines; a process without one passes the group of all")
    try:
        return _step(mine, Over(mine, group), copies)
    finally:
        for engine in mine:
            engine._look.looked = None


def _step(mine: list[Engine], over: Over, copies: list[nn.Parameter]) -> float | None:
    boundaries = [_at_boundary(engine) for engine in mine]
    fault, problem = _fault(mine, boundaries)
    apart = over.rows([float(any(boundaries)), float(not all(boundaries)), float(bool(fault))])
    boundary, between = bool(apart[:, 0].any()), bool(apart[:, 1].any())
    if boundary and between:
        where = "; ".join(f"rank {rank}: {_moment(row)}" for rank, row in enumerate(apart.tolist()))
        problem = UsageError(
            f"[step_together] the engines were stepped apart: some are at an accumulation boundary, others between two "
            f"({where}). Give them the same gradient_accumulation_steps and step them together only"
        )
        fault = fault_text(problem)
    elif apart[:, 2].any() and problem is None:
        problem = UsageError(f"[step_together] {fault or 'another rank cannot step; see its error'}")
    alone = over.group is None and boundary and not between  # between two, the others of an engine exchange nothing
    if problem is not None and not alone:
        raise problem
    for engine in mine:
        engine._look.looked = (
            fault,
            problem,
        )  # without a group, where the ranks of the first one exchange faults, all get it
    norm = _common_norm(mine, over, copies) if boundary else None
    _step_each(mine, norm)
    return norm


def _at_boundary(engine: Engine) -> bool:
    engine._updates.trained_by("step")
    return engine._accumulation.at_boundary()


def _fault(engines: list[Engine], boundaries: list[bool]) -> tuple[str, Exception | None]:
    """The first thing that keeps one of them from its step; the others are not to step then."""
    for engine, boundary in zip(engines, boundaries, strict=True):
        if boundary:
            fault, problem = engine._look.look(before_step=not engine._look.in_backward)
            if fault:
                return fault, problem
        try:
            engine.core.check_step()
        except Exception as error:
            return fault_text(error), error
    return "", None


def _moment(row: list[float]) -> str:
    boundary, between, _ = row
    return "both" if boundary and between else "boundary" if boundary else "between" if between else "no engine"


class Over:
    """The processes that hold the engines; without a group this one."""

    def __init__(self, engines: list[Engine], group: Any) -> None:
        self.group = None if group is None else _mesh.core_group(group)
        self._device = torch.device("cpu")
        if isinstance(group, dist.ProcessGroup):
            self._device = group_device(group) or self._device
        elif engines:
            self._device = engines[0].device

    def rows(self, own: list[float]) -> torch.Tensor:
        """The numbers of all of them, a row for each, in rank order."""
        row = torch.tensor(own, dtype=torch.float64, device=self._device)
        if self.group is None or self.group.size == 1:
            return row[None].cpu()
        rows = row.new_empty(self.group.size * row.numel())
        self.group.all_gather(rows, row, "engines that step together")
        return rows.view(self.group.size, -1).cpu()


def _common_norm(engines: list[Engine], over: Over, copies: list[nn.Parameter]) -> float:
    if over.group is None:
        return math.sqrt(sum(engine.grad_norm() ** 2 for engine in engines))
    squares, problem = 0.0, None
    for engine in engines:  # each: others of its ranks may hold no engine that failed
        try:
            squares += engine.norm_contribution([param for param in copies if engine._updates.optimizes(param)])
        except dist.DistBackendError:
            raise
        except Exception as error:  # of the ranks of one engine
            problem = problem or error
    rows = over.rows([squares, float(problem is not None)])
    if problem is not None:
        raise problem
    if rows[:, 1].any():
        ranks = ", ".join(map(str, rows[:, 1].nonzero().flatten().tolist()))
        raise UsageError(f"[step_together] no engine was stepped: the norm failed on rank {ranks}, see the error there")
    return math.sqrt(sum(rows[:, 0].tolist()))


def _step_each(engines: list[Engine], norm: float | None) -> None:
    """All of them, whatever one has to report."""
    errors: list[RuntimeError] = []
    for engine in engines:
        try:
            engine.step(global_norm=norm)
        except dist.DistBackendError:
            raise
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]
