"""The parts that checkpoints are made of, and go back to."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from tessera import _core
from tessera.engine._contents import Contents
from tessera.engine._ranks import Ranks
from tessera.engine._updates import Updates
from tessera.engine.program import Program
from tessera.lr_schedules import Scheduler


class Run(Protocol):
    """An engine, with the parts that a user may exchange."""

    @property
    def core(self) -> _core.Engine: ...
    @property
    def module(self) -> nn.Module: ...
    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None: ...
    @property
    def lr_scheduler(self) -> Scheduler | None: ...
    @property
    def training_dataloader(self) -> Any: ...
    @property
    def _settings(self) -> _core.Config: ...
    @property
    def _ranks(self) -> Ranks: ...
    @property
    def _updates(self) -> Updates: ...
    @property
    def _contents(self) -> Contents: ...
    @property
    def _program(self) -> Program: ...
    def join_thawed(self) -> None: ...
    def _warn_user(self, lines: list[str]) -> None: ...


def names_of(run: Run) -> dict[int, str]:
    """The name that the core has for every parameter, by id."""
    return {id(spec.tensor): spec.name for spec in run.core.params()}


def buffers_of(run: Run) -> dict[str, torch.Tensor]:
    """The buffers that state_dict() has, each once."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in run.module.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found
