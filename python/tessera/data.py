"""Loading data: one loader per rank over disjoint parts of a dataset."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Sampler

from tessera._random import aside
from tessera.errors import ConfigError

__all__ = ["Loader", "RepeatingLoader"]

ROUTES = ("train", "eval", "predict")


class Indexed(Protocol):
    """A dataset that is no torch.utils.data.Dataset."""

    def __getitem__(self, index: int, /) -> Any: ...

    def __len__(self) -> int: ...


class Loader:
    """A DataLoader whose sampler gets a new epoch number, and so a new order, at every pass. Its position can be saved:
    after load_state_dict() the next pass, or the one under way, gives the batches that were to come, and draws nothing
    from the random generators that the pass had drawn before it was saved (the seed of its iterator, of a sampler)."""

    def __init__(self, loader: TorchLoader[Any], first_epoch: int = 0, world_size: int = 1) -> None:
        self.loader = loader
        self.epoch = first_epoch
        self._world_size = world_size
        self._under_way = False
        self._taken = 0  # batches of the pass under way
        self._skip = 0  # of the next one
        self._loads = 0
        self._begin_with: torch.Tensor | None = None  # of the next one, where it goes on
        self.begin: torch.Tensor | None = None  # torch's generator when the pass under way began

    def __iter__(self) -> Iterator[Any]:
        """A pass begins with its first batch."""
        again = True
        while again:
            again, loads = False, self._loads
            for batch in self._from(self._begin()):
                self._taken += 1
                yield batch
                if self._loads != loads:  # meanwhile: it goes on from there
                    again = True
                    break
        self._under_way, self._taken = False, 0

    def _begin(self) -> int:
        """How many batches the pass skips."""
        skip, self._skip = self._skip, 0
        if hasattr(self.loader.sampler, "set_epoch"):
            self.loader.sampler.set_epoch(self.epoch)
        self.epoch += 1
        self._under_way, self._taken = True, skip
        self.begin, self._begin_with = self._begin_with, None
        if skip == 0 or self.begin is None:
            self.begin = torch.get_rng_state()
        return skip

    def _from(self, skip: int) -> Iterator[Any]:
        if skip == 0:
            return iter(self.loader)
        with aside(self.begin):
            return self._after(skip)

    def _after(self, skip: int) -> Iterator[Any]:
        batches = self.loader.batch_sampler
        if batches is None or isinstance(self.loader.dataset, IterableDataset):
            return _after(iter(self.loader), skip)
        after = _After(batches, skip)
        rest = TorchLoader(
            self.loader.dataset,
            batch_sampler=after,
            num_workers=self.loader.num_workers,
            collate_fn=self.loader.collate_fn,
            pin_memory=self.loader.pin_memory,
        )
        iterator = iter(rest)
        after.start()  # it draws once the iterator has drawn its seed
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """The pass under way and the samples of all ranks that it has given."""
        samples = self._taken * (self.batch_size or 1) * self._world_size
        return {"epoch": self.epoch - 1 if self._under_way else self.epoch, "samples": samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """For the next pass; with another batch size or number of ranks it begins at the batch that holds the place.
        `begin` beside what state_dict() gave: where torch's generator was when the pass began, on this rank."""
        self.epoch = state["epoch"]
        self._under_way, self._taken = False, 0
        self._loads += 1
        self._skip = state["samples"] // ((self.batch_size or 1) * self._world_size)
        self._begin_with = state.get("begin")

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def dataset(self) -> Dataset[Any]:
        """What the samples are taken from."""
        return self.loader.dataset

    @property
    def sampler(self) -> Sampler[Any] | Iterable[Any]:
        """The sampler of the loader behind it."""
        return self.loader.sampler

    @property
    def batch_size(self) -> int | None:
        """Samples of a batch of this rank; None where the loader does not say."""
        return self.loader.batch_size


class _After:
    """The batches of a sampler after the first ones, once."""

    def __init__(self, batches: Iterable[Any], skip: int) -> None:
        self.batches = batches
        self.skip = skip
        self.rest: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def start(self) -> Iterator[Any]:
        if self.rest is None:
            self.rest = _after(iter(self.batches), self.skip)
        return self.rest

    def __next__(self) -> Any:
        return next(self.start())


def _after(iterator: Iterator[Any], skip: int) -> Iterator[Any]:
    """Now: what is left out draws its random numbers before this returns."""
    for _ in itertools.islice(iterator, skip):
        pass
    return iterator


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
    dataset: Dataset[Any] | Indexed,
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
        raise ConfigError(f"[data] training data must be a torch.utils.data.Dataset, got {type(dataset).__name__}")
    if route not in ROUTES:
        raise ConfigError(f"[data] route must be one of {', '.join(ROUTES)}, got {route!r}")
    samples: Any = dataset  # torch says Dataset where it needs no more than an Indexed
    if data_sampler is None and not isinstance(dataset, IterableDataset):
        data_sampler = DistributedSampler(
            samples, num_replicas=world_size, rank=rank, shuffle=route == "train", drop_last=drop_last
        )
    return Loader(
        TorchLoader(
            samples,
            batch_size=batch_size,
            sampler=data_sampler,
            pin_memory=pin_memory,
            collate_fn=collate_fn,
            num_workers=num_workers,
            drop_last=drop_last,
        ),
        world_size=world_size,
    )
