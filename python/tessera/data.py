"""Loading data: one loader per rank over disjoint parts of a dataset."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset, Sampler, get_worker_info
from torch.utils.data import DataLoader as TorchLoader

from tessera import _core
from tessera._random import aside, random_states
from tessera.errors import ConfigError

__all__ = ["Loader", "RepeatingLoader"]

ROUTES = ("train", "eval", "predict")
Collate = Callable[[list[Any]], object]
"""A batch of a list of samples."""


T_co = TypeVar("T_co", covariant=True)


class Indexed(Protocol[T_co]):
    """A dataset that is no torch.utils.data.Dataset."""

    def __getitem__(self, index: int, /) -> T_co: ...

    def __len__(self) -> int: ...


class Loader:
    """A DataLoader whose sampler gets a new epoch number, and so a new order, at every pass. Its position can be saved:
    after load_state_dict() the next pass, or the one under way, gives what was to come, and draws nothing from the
    random generators that the pass had drawn before it was saved (the seed of the pass's iterator, of a sampler).

    On as many ranks with the same batches the samples to come have the same bits, whatever a dataset draws and in how
    many workers: a worker begins each batch with a seed of the batch's. On other ranks, or with other batches, samples
    that a DistributedSampler deals out come once each; those of another sampler, or of a stream, go on at the batch
    that holds the place."""

    def __init__(self, loader: TorchLoader[Any], first_epoch: int = 0, world_size: int | None = None) -> None:
        """`world_size`: over how many ranks the sampler deals the samples out; by default what it says itself
        (DistributedSampler), else 1. ConfigError where both say it and differ."""
        self.loader = loader
        self.epoch = first_epoch
        dealt = next((n for of in _drawing(loader) if isinstance(n := getattr(of, "num_replicas", None), int)), None)
        if world_size is not None and dealt is not None and world_size != dealt:
            raise ConfigError(f"[data] world_size is {world_size}, but the sampler deals samples out to {dealt} ranks")
        self._world_size = world_size or dealt or 1
        self._under_way = False
        self._given = 0  # samples of all ranks, of the pass under way
        self._start = 0  # samples that the next pass leaves out
        self._loads = 0
        self._begin_with: Any = None  # random states of the next pass, where it goes on
        self._began: Any = None  # those of when the pass under way began

    def __iter__(self) -> Iterator[Any]:
        """A pass begins with its first batch."""
        again = True
        while again:
            again, loads = False, self._loads
            for batch in self._begun():
                self._given += self._round
                yield batch
                if self._loads != loads:  # meanwhile: it goes on from there
                    again = True
                    break
        self._under_way, self._given = False, 0

    @property
    def _round(self) -> int:
        """Samples of a batch of every rank."""
        return (self.batch_size or 1) * self._world_size

    def _begun(self) -> Iterator[Any]:
        start, self._start = self._start, 0
        for of in _drawing(self.loader):
            if callable(set_epoch := getattr(of, "set_epoch", None)):
                set_epoch(self.epoch)
        self.epoch += 1
        self._under_way, self._given = True, start
        self._began, self._begin_with = self._begin_with, None
        if isinstance(self._began, dict):
            self._put_generators(self._began.get("generators"))
        if start == 0 or self._began is None:
            self._began = self._random_states()
        if start == 0:
            return self._batches(start)
        with aside(self._began):
            return self._batches(start)

    @property
    def begin(self) -> dict[str, object] | torch.Tensor | None:
        """Where the random generators of this rank are when the pass to go on with begins: of the process, and those
        that the loader or a sampler has for itself. None where no pass has begun."""
        if self._under_way or self._begin_with is not None or self._began is None:
            return self._began if self._begin_with is None else self._begin_with
        return self._random_states()

    def _random_states(self) -> dict[str, Any]:
        return random_states(of_device=False) | {"generators": [g.get_state() for g in _generators(self.loader)]}

    def _put_generators(self, states: list[torch.Tensor] | None) -> None:
        own = _generators(self.loader)
        if states is not None and len(states) != len(own):
            raise ConfigError(
                f"[data] the state is of a loader with {len(states)} random generators of its own, and this one has "
                f"{len(own)}: make it as in that run, or begin without its state"
            )
        for generator, state in zip(own, states or [], strict=False):
            generator.set_state(state)

    def _batches(self, start: int) -> Iterator[Any]:
        loader = self.loader
        batches = loader.batch_sampler
        own = type(loader).__iter__ is not TorchLoader.__iter__  # what a class of its own does with batches stays
        if own or batches is None or isinstance(loader.dataset, IterableDataset):
            self._given = start - start % self._round
            return _after(iter(loader), start // self._round)
        seeds = loader.num_workers > 0 and not loader.persistent_workers and loader.worker_init_fn is None
        if start == 0 and not seeds:
            return iter(loader)
        skip = start // self._round
        rest = None if start == 0 else _dealt(loader, start)
        if rest is not None:
            after = _After(BatchSampler(rest, self.batch_size or 1, loader.drop_last), skip, 0)
        else:
            after = _After(batches, skip, skip)
            self._given = skip * self._round
        iterator = iter(_like(loader, _Seeded(loader.dataset) if seeds else loader.dataset, after))
        after.start()  # the sampler draws once the iterator has drawn its seed
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """The pass under way, or the one to come, and the samples of all ranks that it has given, of how many, where
        the dataset says it."""
        done = self._given if self._under_way else self._start
        state = {"epoch": self.epoch - 1 if self._under_way else self.epoch, "samples": done}
        size = self._size()
        return {**state, "size": size} if done > 0 and size is not None else state

    def _size(self) -> int | None:
        dataset: Any = self.loader.dataset
        if isinstance(dataset, IterableDataset):
            return None
        try:
            return len(dataset)
        except (TypeError, NotImplementedError):  # it has no length, or says that it has none
            return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """For the next pass, or the one under way. `begin` beside what state_dict() gave: where the random generators
        were when the pass began, on this rank. ConfigError for a place in a larger dataset."""
        _core.check_position(state["epoch"], state["samples"], state.get("size", 0), self._size() or 0)
        self.epoch = state["epoch"]
        self._under_way, self._given = False, 0
        self._loads += 1
        self._start = state["samples"]
        self._began, self._begin_with = None, state.get("begin")

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def dataset(self) -> Dataset[object]:
        """The dataset that samples are taken from."""
        return self.loader.dataset

    @property
    def sampler(self) -> Sampler[int] | Iterable[object]:
        """The sampler of the loader behind it."""
        return self.loader.sampler

    @property
    def batch_size(self) -> int | None:
        """Samples of a batch of this rank; None where the loader does not say."""
        return self.loader.batch_size


def _drawing(loader: TorchLoader[Any]) -> list[object]:
    """What decides which samples come: the loader and its samplers."""
    batches = loader.batch_sampler
    return [loader, loader.sampler, batches, getattr(batches, "sampler", None)]


def _generators(loader: TorchLoader[Any]) -> list[torch.Generator]:
    """Generators that these have for themselves, each once."""
    found = (getattr(of, "generator", None) for of in _drawing(loader))
    return list({id(g): g for g in found if isinstance(g, torch.Generator) and g.device.type == "cpu"}.values())


class _Batch(list[Any]):
    """Indices of a batch, and which of its pass it is."""

    def __init__(self, indices: Iterable[Any], number: int) -> None:
        super().__init__(indices)
        self.number = number

    def __reduce__(self) -> Any:
        return _Batch, (list(self), self.number)


class _After:
    """The batches of a sampler after the first ones, once; the first given has the number `first`."""

    def __init__(self, batches: Iterable[Any], first: int, skip: int) -> None:
        self.batches, self.skip = batches, skip
        self.numbers = itertools.count(first)
        self.rest: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def start(self) -> Iterator[Any]:
        if self.rest is None:
            self.rest = _after(iter(self.batches), self.skip)
        return self.rest

    def __next__(self) -> Any:
        return _Batch(next(self.start()), next(self.numbers))


class _Seeded(Dataset[Any]):
    """A dataset whose workers begin each batch with a seed of the batch's: what they draw for it is then the same
    whoever of them has it, and whatever came before."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:  # get_worker_info().dataset is this one
        if name == "dataset":  # not there yet: it is being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, batch: _Batch) -> list[Any]:
        worker = get_worker_info()
        assert worker is not None
        seed = worker.seed - worker.id + batch.number
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        at_once = getattr(self.dataset, "__getitems__", None)
        return at_once(list(batch)) if at_once else [self.dataset[index] for index in batch]


def _dealt(loader: TorchLoader[Any], start: int) -> list[int] | None:
    """The samples that this rank's DistributedSampler gives of a pass whose first samples are gone, whoever had them.
    None for another sampler."""
    sampler = loader.sampler
    of_torch = isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__
    if not of_torch or type(loader.batch_sampler) is not BatchSampler:
        return None
    assert isinstance(sampler, DistributedSampler)
    # Sizes of what the sampler deals out: a program may have given it another dataset than the loader's.
    return _core.rank_order(
        len(sampler.dataset),  # type: ignore[arg-type]
        sampler.rank,
        sampler.num_replicas,
        sampler.shuffle,
        sampler.seed,
        sampler.drop_last,
        sampler.epoch,
        start,
    )


def _like(loader: TorchLoader[Any], dataset: Dataset[Any], batches: Iterable[Any]) -> TorchLoader[Any]:
    kept = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"]
    kept += ["generator", "prefetch_factor", "in_order"]
    return TorchLoader(dataset, batch_sampler=batches, **{name: getattr(loader, name) for name in kept})


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
    dataset: Dataset[object] | Indexed[object],
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    route: str = "train",
    pin_memory: bool = False,
    data_sampler: Sampler[int] | Sampler[list[int]] | None = None,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
    drop_last: bool = False,
) -> Loader:
    """The loader of one rank. Shuffled for route "train"; ConfigError for what is not a Dataset."""
    if not isinstance(dataset, Dataset) and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigError(f"[data] training data must be a torch.utils.data.Dataset, got {type(dataset).__name__}")
    if route not in ROUTES:
        raise ConfigError(f"[data] route must be one of {', '.join(ROUTES)}, got {route!r}")
    if collate_fn is not None and not callable(collate_fn):
        raise ConfigError(f"[data] collate_fn must be a function of a list of samples, got {type(collate_fn).__name__}")
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
