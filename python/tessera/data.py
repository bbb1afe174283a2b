"""Loading data: one loader per rank over disjoint parts of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset, Sampler
from torch.utils.data import DataLoader as TorchLoader

from tessera import _core
from tessera._batches import Passes
from tessera._random import aside, own_generators, put_states, random_states, states_of, try_random_states
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
        (DistributedSampler), else 1. ConfigError where both say it and differ, and for what is no DataLoader."""
        if not isinstance(loader, TorchLoader):
            raise ConfigError(
                f"[data] a Loader is made of a torch.utils.data.DataLoader, got {type(loader).__name__}; for a dataset "
                "use engine.data_loader(dataset)"
            )
        _check_count(first_epoch, "first_epoch", 0)
        self.loader = loader
        self.epoch = first_epoch
        dealt = next((n for of in _samplers(loader) if isinstance(n := getattr(of, "num_replicas", None), int)), None)
        if world_size is not None:
            _check_count(world_size, "world_size", 1)
            if dealt is not None and world_size != dealt:
                raise ConfigError(
                    f"[data] world_size is {world_size}, but the sampler deals samples out to {dealt} ranks"
                )
        self._world_size = world_size or dealt or 1
        self._passes = Passes(loader)
        self._under_way = False
        self._given = 0  # samples of all ranks, of the pass under way
        self._start = 0  # samples that the next pass leaves out
        self._loads = 0
        self._begin_with: dict[str, Any] | None = None  # `begin` of the next pass, where it goes on
        self._drawn_with: list[Any] | None = None  # and `drawn`
        self._began: dict[str, Any] | None = None  # `begin` of the pass under way

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
        for of in _samplers(self.loader):
            if callable(set_epoch := getattr(of, "set_epoch", None)):
                set_epoch(self.epoch)
        self.epoch += 1
        self._under_way, self._given = True, start
        self._began, self._begin_with = self._begin_with, None
        drawn, self._drawn_with = self._drawn_with, None
        if self._began is not None:
            self._put_generators(self._began)
        if start == 0 or self._began is None:
            self._began = self._random_states()
        if start == 0:
            return self._batches(start)
        with aside(self._began):
            batches = self._batches(start)
        if drawn is not None and self.loader.num_workers == 0:
            put_states([*_generators(self.loader), *_generators_of_data(self.loader)], drawn)
        return batches

    @property
    def begin(self) -> dict[str, Any] | None:
        """Where the random generators of this rank are when the pass to go on with begins: of the process, those that
        the loader or a sampler has for itself, and without workers those of the dataset and of collate_fn. None where
        the state that was loaded does not have it."""
        if self._begin_with is not None:
            return self._begin_with
        if self._under_way:
            return self._began
        return None if self._start > 0 else self._random_states()

    @property
    def drawn(self) -> list[object] | None:
        """Where those that are not of the process are now, amid a pass; None with workers, which are ahead of it."""
        if self.loader.num_workers > 0:
            return None
        if self._drawn_with is not None:
            return self._drawn_with
        return states_of([*_generators(self.loader), *_generators_of_data(self.loader)])

    def _random_states(self) -> dict[str, Any]:
        states = random_states(of_device=False) | {"generators": states_of(_generators(self.loader))}
        return states | {"data": states_of(of_data)} if (of_data := _generators_of_data(self.loader)) else states

    def _put_generators(self, states: dict[str, Any]) -> None:
        """Of `begin`."""
        put_states(_generators(self.loader), states.get("generators", []))
        if self.loader.num_workers == 0 and "data" in states:
            put_states(_generators_of_data(self.loader), states["data"])

    def _batches(self, start: int) -> Iterator[Any]:
        skip = start // self._round
        left = None if start == 0 else _dealt(self.loader, start)
        if left is None or not self._passes.by_index:
            self._given = skip * self._round
            return self._passes.begin(skip)
        return self._passes.begin(skip, BatchSampler(left, self.batch_size or 1, self.loader.drop_last))

    def state_dict(self) -> dict[str, Any]:
        """The pass under way, or the one to come, and the samples of all ranks that it has given, of how many, where
        the dataset says it; of a stream the number of workers."""
        done = self._given if self._under_way else self._start
        state = {"epoch": self.epoch - 1 if self._under_way else self.epoch, "samples": done}
        size = self._size()
        if done == 0:
            return state
        if self._passes.of_stream:
            return {**state, "workers": self.loader.num_workers}
        if _dealing(self.loader) is not None and size is not None:
            done = min(done, size)  # the last round may not be full, or have some twice
        return {**state, "samples": done, "size": size} if size is not None and done <= size else state

    def _size(self) -> int | None:
        """Of what is dealt out: a program may have given the sampler another dataset than the loader's."""
        sampler = _dealing(self.loader)
        dataset: Any = self.loader.dataset if sampler is None else sampler.dataset
        if isinstance(dataset, IterableDataset):
            return None
        try:
            return len(dataset)
        except (TypeError, NotImplementedError):  # it has no length, or says that it has none
            return None

    def check(self, state: dict[str, Any]) -> None:
        """ConfigError for what load_state_dict() does not take; nothing has changed."""
        numbers = _numbers(state)
        workers = self.loader.num_workers if self._passes.of_stream else None
        _core.check_position(*numbers, self._size() or 0, workers)
        begin, drawn = _begin_of(state), state.get("drawn")
        if begin is not None:
            _check_begin(begin)
        own, of_data = _generators(self.loader), _generators_of_data(self.loader)
        if begin is not None:
            _check_states(own, begin.get("generators", []), "it and its samplers")
            if self.loader.num_workers == 0 and "data" in begin:
                _check_states(of_data, begin["data"], "its dataset and collate_fn")
        if drawn is not None and self.loader.num_workers == 0:
            _check_states([*own, *of_data], drawn, "it, its samplers, its dataset and collate_fn")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """For the next pass, or the one under way. Beside what state_dict() gave: `begin` and `drawn`, which were the
        loader's on this rank. ConfigError for a place in a larger dataset, in a stream of other workers, for states of
        other generators, and for what no loader has given."""
        self.check(state)
        self.epoch = state["epoch"]
        self._under_way, self._given = False, 0
        self._loads += 1
        self._start = state["samples"]
        self._began, self._begin_with, self._drawn_with = None, _begin_of(state), state.get("drawn")

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


# ---------------------------------------------------------------- states


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53


def _check_count(value: object, what: str, least: int) -> None:
    if not _is_count(value) or value < least:  # type: ignore[operator]
        raise ConfigError(f"[data] {what} must be a number from {least}, got {value!r}")


def _numbers(state: object) -> tuple[int, int, int, int | None]:
    """Epoch, samples, size (0: not known) and workers (None: of no stream)."""
    if not isinstance(state, dict):
        raise ConfigError(
            f"[data] the state of a loader is a dict, as state_dict() gives it, got {type(state).__name__}"
        )
    for key, needed in (("epoch", True), ("samples", True), ("size", False), ("workers", False)):
        if key not in state and needed:
            raise ConfigError(f"[data] the state of a loader has no '{key}'; load what state_dict() gave, whole")
        if key in state and not _is_count(state[key]):
            raise ConfigError(
                f"[data] '{key}' of the state of a loader is {state[key]!r:.40}, which is no number that can be; "
                "load what state_dict() gave, unchanged"
            )
    return state["epoch"], state["samples"], state.get("size", 0), state.get("workers")


def _begin_of(state: dict[str, Any]) -> dict[str, Any] | None:
    begin = state.get("begin")
    if isinstance(begin, torch.Tensor):  # of torch's generator alone
        return {"torch": begin}
    if begin is not None and not isinstance(begin, dict):
        raise ConfigError(f"[data] 'begin' of the state of a loader is a dict, got {type(begin).__name__}")
    return begin


def _check_begin(begin: dict[str, Any]) -> None:
    try:
        try_random_states(begin)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(
            f"[data] 'begin' of the state of a loader is no state of the random generators ({error}); load what the "
            "loader's begin was, unchanged"
        ) from None


def _check_states(generators: list[Any], states: Any, of: str) -> None:
    """They are as they were afterwards."""
    if not isinstance(states, list):
        raise ConfigError(f"[data] states of random generators are a list, got {type(states).__name__}")
    if len(states) != len(generators):
        raise ConfigError(
            f"[data] the state is of a loader with {len(states)} random generators of its own (those of {of}), and "
            f"this one has {len(generators)}: make it as in that run, its generators in __init__, or begin "
            "without its state"
        )
    kept = states_of(generators)
    try:
        put_states(generators, states)
    except Exception as error:  # of any kind: they are of torch, Python and numpy
        raise ConfigError(
            f"[data] the state of a loader has one of a random generator that {of} do not have, or that is damaged "
            f"({error}): make the loader as in that run, or begin without its state"
        ) from None
    finally:
        put_states(generators, kept)


# ---------------------------------------------------------------- what a loader is made of


def _samplers(loader: TorchLoader[Any]) -> list[object]:
    """What decides which samples come: the loader and its samplers."""
    batches = loader.batch_sampler
    return [loader, loader.sampler, batches, getattr(batches, "sampler", None)]


def _generators(loader: TorchLoader[Any]) -> list[Any]:
    """Random generators that these have for themselves, also in samplers of samplers."""
    return own_generators(_samplers(loader), _is_sampler)


def _generators_of_data(loader: TorchLoader[Any]) -> list[Any]:
    """Others that the dataset and collate_fn have, where they work in this process."""
    if loader.num_workers > 0:
        return []
    order = {id(generator) for generator in _generators(loader)}
    collate = getattr(loader.collate_fn, "__self__", loader.collate_fn)
    return [each for each in own_generators([loader.dataset, collate], _is_data) if id(each) not in order]


def _is_sampler(value: object) -> bool:
    kind = type(value)
    plain = hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__") and hasattr(value, "__dict__")
    return isinstance(value, Sampler) or (plain and not isinstance(value, (type, Dataset, torch.nn.Module)))


def _is_data(value: object) -> bool:
    """A dataset in a dataset, or what is done with its rows."""
    if isinstance(value, (type, FunctionType, MethodType, BuiltinFunctionType, torch.nn.Module, torch.Tensor)):
        return False
    does = callable(value) or hasattr(type(value), "__getitem__")
    return isinstance(value, Dataset) or (does and hasattr(value, "__dict__"))


def _dealing(loader: TorchLoader[Any]) -> DistributedSampler[Any] | None:
    """The sampler of torch that deals samples out to ranks, in batches of torch's."""
    sampler = loader.sampler
    of_torch = isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__
    return sampler if of_torch and type(loader.batch_sampler) is BatchSampler else None  # type: ignore[return-value]


def _dealt(loader: TorchLoader[Any], start: int) -> list[int] | None:
    """The samples that this rank's DistributedSampler gives of a pass whose first samples are gone, whoever had them.
    None for another sampler."""
    sampler = _dealing(loader)
    if sampler is None:
        return None
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
