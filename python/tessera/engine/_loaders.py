"""Loaders of an engine's data."""

from __future__ import annotations

from typing import Protocol

from torch.utils.data import Dataset, Sampler

from tessera import _core
from tessera._former import renamed, takes_former
from tessera.data import Collate, Indexed, Loader, make_loader
from tessera.engine._ranks import Ranks


class Loading(Protocol):
    """An engine, whose defaults a user may exchange."""

    @property
    def collate_fn(self) -> Collate | None: ...
    @property
    def num_workers(self) -> int: ...
    @property
    def _ranks(self) -> Ranks: ...
    @property
    def _settings(self) -> _core.Config: ...
    def train_micro_batch_size_per_gpu(self) -> int: ...


class Loaders:
    def __init__(self, engine: Loading) -> None:
        self._engine = engine

    @takes_former(renamed("Engine.data_loader", num_local_io_workers="num_workers"))
    def data_loader(
        self,
        dataset: Dataset[object] | Indexed[object],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = False,
        data_sampler: Sampler[int] | Sampler[list[int]] | None = None,
        collate_fn: Collate | None = None,
        num_workers: int | None = None,
    ) -> Loader:
        """A loader of this rank's part of `dataset`; the micro batch is the default batch size."""
        engine = self._engine
        return make_loader(
            dataset,
            batch_size=batch_size or engine.train_micro_batch_size_per_gpu(),
            rank=engine._ranks.dp_rank,
            world_size=engine._ranks.dp_world_size,
            route=route,
            pin_memory=pin_memory,
            data_sampler=data_sampler,
            collate_fn=collate_fn or engine.collate_fn,
            num_workers=engine.num_workers if num_workers is None else num_workers,
            drop_last=engine._settings.dataloader_drop_last,
        )
