"""Loading data: one loader per rank over disjoint parts of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Sampler

from tessera.errors import ConfigError

ROUTES = ("train", "eval", "predict")


class Loader:
    """A DataLoader whose sampler gets a new epoch number, and so a new order, at every pass."""

    def __init__(self, loader: TorchLoader[Any], first_epoch: int = 0) -> None:
        self.loader = loader
        self.epoch = first_epoch

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self.loader.sampler, "set_epoch"):
            self.loader.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    @property
    def sampler(self) -> Any:
        return self.loader.sampler

    @property
    def batch_size(self) -> int | None:
        return self.loader.batch_size


class RepeatingLoader:
    """Starts a loader again whenever it ends, so that next() never stops."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._iterator = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)


def make_loader(
    dataset: Any,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    route: str = "train",
    pin_memory: bool = False,
    data_sampler: Sampler[Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    drop_last: bool = False,
) -> Loader:
    """The loader of one rank. Shuffled for route "train"; ConfigError for what is not a Dataset."""
    if not isinstance(dataset, Dataset) and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigError(
            f"[deepspeed_io] training data must be a torch.utils.data.Dataset, got {type(dataset).__name__}"
        )
    if route not in ROUTES:
        raise ConfigError(f"[deepspeed_io] route must be one of {', '.join(ROUTES)}, got {route!r}")
    if data_sampler is None and not isinstance(dataset, IterableDataset):
        data_sampler = DistributedSampler(
            dataset, num_replicas=world_size, rank=rank, shuffle=route == "train", drop_last=drop_last
        )
    return Loader(
        TorchLoader(
            dataset,
            batch_size=batch_size,
            sampler=data_sampler,
            pin_memory=pin_memory,
            collate_fn=collate_fn,
            num_workers=num_workers,
            drop_last=drop_last,
        )
    )
