"""The micro-batches of a pipeline: read where they are needed, and found whole by all ranks before any is computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from tessera.data import RepeatingLoader
from tessera.errors import ConfigError, UsageError
from tessera.pipeline._grid import Everyone, Grid


class Reader(Protocol):
    """Who reads: the engine of a stage."""

    @property
    def training_dataloader(self) -> Any: ...
    @property
    def device(self) -> torch.device: ...
    def is_first_stage(self) -> bool: ...
    def is_last_stage(self) -> bool: ...


class Feed:
    def __init__(self, engine: Reader, grid: Grid, everyone: Everyone) -> None:
        self._engine, self._grid, self._everyone = engine, grid, everyone
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

    def read(self, data_iter: Iterator[Any] | None, micro_batches: int) -> list[tuple[Any, Any]] | None:
        """The micro-batches where they are needed, once all ranks have theirs."""
        reads = self._engine.is_first_stage() or self._engine.is_last_stage()
        batches: list[tuple[Any, Any]] = []
        problem: Exception | None = None
        try:
            source = self._own_data() if data_iter is None and reads else data_iter
            for _ in range(micro_batches if reads else 0):
                batches.append(self._micro_batch(source))
        except StopIteration:
            pass
        except Exception as error:
            problem = error
        rows = self._everyone.rows([micro_batches, len(batches) if reads else -1, problem is not None])
        if any(failed for *_, failed in rows):
            where = f"[pipeline] {self._grid.name()} could not read its data: "
            self._everyone.agree("" if problem is None else f"{where}{type(problem).__name__}: {problem}")
        if problem is not None:
            raise problem
        self._check(rows, micro_batches)
        return batches if reads else None

    def _check(self, rows: list[list[float]], micro_batches: int) -> None:
        """`rows`, of every rank: how many it wants, and how many it has read (-1: reads none)."""
        for rank, (count, read, _) in enumerate(rows):
            where = self._grid.name(rank)
            if count != micro_batches:
                raise UsageError(
                    f"[pipeline] {where} has {int(count)} micro-batches for this batch, {self._grid.name()} has "
                    f"{micro_batches}; gradient_accumulation_steps must be the same on all stages"
                )
            if 0 < read < micro_batches:
                raise UsageError(
                    f"[pipeline] data_iter of {where} ended after {int(read)} of {micro_batches} micro-batches; give "
                    "whole batches, as an iterator over a loader with drop_last, or tessera.data.RepeatingLoader"
                )
        ended = [rank for rank, (_, read, _) in enumerate(rows) if read == 0]
        if ended and len(ended) == sum(read >= 0 for _, read, _ in rows):
            raise StopIteration
        if ended:
            raise UsageError(f"[pipeline] data_iter of rank {ended[0]} has ended, those of other ranks have not")

    def _micro_batch(self, data_iter: Iterator[Any] | None) -> tuple[Any, Any]:
        assert data_iter is not None
        batch = next(data_iter)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ConfigError("[pipeline] a micro-batch is a pair (inputs, labels); data_iter yields something else")
        moved = tree_map(lambda x: x.to(self._engine.device) if isinstance(x, torch.Tensor) else x, tuple(batch))
        return moved[0], moved[1]
