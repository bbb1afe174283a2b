"""The micro-batches of a pipeline, read where they are needed; all ranks have theirs before any is computed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from tessera.data import RepeatingLoader
from tessera.errors import ConfigError, UsageError
from tessera.pipeline._grid import Grid


class Reader(Protocol):
    """Who reads: the engine of a stage."""

    @property
    def training_dataloader(self) -> Any: ...
    @property
    def device(self) -> torch.device: ...
    def is_first_stage(self) -> bool: ...
    def is_last_stage(self) -> bool: ...


class Feed:
    def __init__(self, engine: Reader, grid: Grid) -> None:
        self._engine, self._grid = engine, grid
        self._own: Iterator[Any] | None = None

    def _own_data(self) -> Iterator[Any]:
        if self._engine.training_dataloader is None:
            raise UsageError(
                f"[pipeline] {self._grid.name()} reads data and has none: pass data_iter there, or training_data to "
                "initialize()"
            )
        if self._own is None:
            self._own = iter(RepeatingLoader(self._engine.training_dataloader))
        return self._own

    def read(self, data_iter: Iterator[Any] | None, wanted: int) -> list[tuple[Any, Any]] | None:
        """The micro-batches, fewer where there are no more; None where this stage needs none."""
        if not (self._engine.is_first_stage() or self._engine.is_last_stage()):
            return None
        source = self._own_data() if data_iter is None else data_iter
        return [self._micro_batch(batch) for batch in itertools.islice(source, wanted)]

    def _micro_batch(self, batch: Any) -> tuple[Any, Any]:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ConfigError("[pipeline] a micro-batch is a pair (inputs, labels); data_iter yields something else")
        moved = tree_map(lambda x: x.to(self._engine.device) if isinstance(x, torch.Tensor) else x, tuple(batch))
        return moved[0], moved[1]
