"""The passes of a torch DataLoader, each of which can begin at any batch: the same batches, and in workers the same
draws, whatever came before and however many workers there are."""

from __future__ import annotations

import itertools
import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, IterDataPipe, get_worker_info

# Of the user's loader, for those that its passes are made with.
_KEPT = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"]
_KEPT += ["prefetch_factor", "in_order", "persistent_workers"]


class Passes:
    """Makes a loader of its own for each pass, or one for all where workers persist: the seed of a pass is drawn here,
    where torch draws it too, and goes to the workers with each batch. A stream without persistent workers, a pipe of
    torchdata and a class of loaders with an __iter__ of its own make their passes themselves."""

    def __init__(self, loader: TorchLoader[Any]) -> None:
        self.loader = loader
        self.of_stream = isinstance(loader.dataset, IterableDataset)
        self._persistent = loader.num_workers > 0 and loader.persistent_workers
        self._seeds = loader.num_workers > 0 and loader.worker_init_fn is None
        own = type(loader).__iter__ is not TorchLoader.__iter__ or isinstance(loader.dataset, IterDataPipe)
        self.by_index = not own and not self.of_stream
        self._seeded_stream = _SeededStream(loader.dataset) if self._persistent and self._seeds and not own else None
        self._indices = _Indices()
        self._made: TorchLoader[Any] | None = None
        if own and self._persistent:
            _warn_of_workers(loader)

    def begin(self, skip: int, left: Iterable[Any] | None = None) -> Iterator[Any]:
        """The batches of a pass after its first `skip`, which have drawn their random numbers when this returns.
        `left`: the indices of these batches, in the place of what the loader's sampler gives after the first."""
        if not self.by_index:
            return self._of_stream(skip)
        loader, batches = self.loader, self.loader.batch_sampler
        whole: Iterable[Any] = loader.sampler if batches is None else batches
        indices = iter(whole if left is None else left)
        seed = self._draw_seed()
        if left is None:
            _without(indices, skip)
        self._indices.rest = map(_Share, indices, itertools.count(seed + skip)) if self._seeds else indices
        dataset = _Seeded(loader.dataset) if self._seeds else loader.dataset
        how = {"batch_size": None, "sampler": self._indices} if batches is None else {"batch_sampler": self._indices}
        return iter(self._loader(seed, dataset, how))

    def _of_stream(self, skip: int) -> Iterator[Any]:
        if self._seeded_stream is None:
            return _without(iter(self.loader), skip)
        seed = self._draw_seed()
        self._seeded_stream.seed.fill_(seed)
        how = {"batch_size": self.loader.batch_size, "drop_last": self.loader.drop_last}
        return _without(iter(self._loader(seed, self._seeded_stream, how)), skip)

    def _draw_seed(self) -> int:
        return int(torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator))

    def _loader(self, seed: int, dataset: Any, how: dict[str, Any]) -> TorchLoader[Any]:
        """Draws no seed from generators that others draw from."""
        if self._made is not None:
            return self._made
        how |= {name: getattr(self.loader, name) for name in _KEPT}
        made: TorchLoader[Any] = TorchLoader(dataset, generator=torch.Generator().manual_seed(seed), **how)
        self._made = made if self._persistent else None
        return made


def _warn_of_workers(loader: TorchLoader[Any]) -> None:
    what = type(loader) if type(loader) is not TorchLoader else type(loader.dataset)
    warnings.warn(
        f"[data] {what.__name__} makes its passes itself, and with persistent_workers=True the random generators of "
        "its workers go on from pass to pass: a run that goes on from a checkpoint may get another order and other "
        "draws than the run that saved it. Make it with persistent_workers=False",
        stacklevel=4,
    )


def _without(iterator: Iterator[Any], first: int) -> Iterator[Any]:
    for _ in itertools.islice(iterator, first):
        pass
    return iterator


class _Indices:
    """In the place of a sampler: what the pass under way has left."""

    def __init__(self) -> None:
        self.rest: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.rest


def _draw_from(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


class _Share(NamedTuple):
    """What a worker is asked for: an index, or those of a batch."""

    indices: Any
    seed: int


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
        if isinstance(index, _Share):
            _draw_from(index.seed)
            return self.dataset[index.indices]
        return self.dataset[index]

    def __getitems__(self, batch: _Share) -> list[Any]:
        _draw_from(batch.seed)
        at_once = getattr(self.dataset, "__getitems__", None)
        return at_once(list(batch.indices)) if at_once else [self.dataset[index] for index in batch.indices]


class _SeededStream(IterableDataset[Any]):
    """A stream whose workers, which persist, begin each pass with a seed of the pass's."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.seed = torch.zeros((), dtype=torch.int64).share_memory_()

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        assert worker is not None
        _draw_from(int(self.seed) + worker.id)
        return iter(self.dataset)
