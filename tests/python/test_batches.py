"""Passes of a DataLoader behind tessera.data.Loader that go on in another process: order, draws of workers, workers
that persist. Through an engine's checkpoint: engine/test_resume.py."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tessera.data import Loader, RepeatingLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

SIZE, BATCHES = 24, 12  # of a pass


def seed(number: int) -> None:
    for put in (torch.manual_seed, random.seed, np.random.seed):
        put(number)


class Rows(Dataset[torch.Tensor]):
    """In workers each is drawn by all generators."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = 0.0 if get_worker_info() is None else torch.rand(1).item() + random.random() + np.random.rand()
        return torch.tensor([index, drawn], dtype=torch.float64)


class Stream(IterableDataset[torch.Tensor]):
    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        share = range(SIZE)[worker.id if worker else 0 :: worker.num_workers if worker else 1]
        return (Rows()[index] for index in share)


class Eager(Sampler[int]):
    """Draws as its iterator is made."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE).tolist())


class EagerBatches(Sampler[list[int]]):
    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(SIZE).view(BATCHES, 2).tolist())


KINDS: dict[str, Callable[..., DataLoader[torch.Tensor]]] = {
    "shuffled": lambda **how: DataLoader(Rows(), 2, shuffle=True, **how),
    "eager sampler": lambda **how: DataLoader(Rows(), 2, sampler=Eager(), **how),
    "eager batches": lambda **how: DataLoader(Rows(), batch_sampler=EagerBatches(), **how),
    "no batches": lambda **how: DataLoader(Rows(), None, sampler=Eager(), **how),
    "stream": lambda **how: DataLoader(Stream(), 2, **how),
}


def taken_from(loader: Loader, first: int) -> tuple[dict[str, Any], list[Any], RepeatingLoader]:
    """After `first` batches: the state, and what is left of the pass."""
    batches = RepeatingLoader(loader)
    for _ in range(first):
        next(batches)
    state = loader.state_dict() | {"begin": loader.begin, "drawn": loader.drawn}
    return state, rest_of(loader, batches, first), batches


def rest_of(loader: Loader, batches: RepeatingLoader, first: int) -> list[Any]:
    return [next(batches).tolist() for _ in range(len(loader) - first % len(loader))]


@pytest.mark.parametrize("first", [3, 27])
@pytest.mark.parametrize("how", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_goes_on_in_another_process_and_in_this_one(kind: str, how: dict[str, Any], first: int) -> None:
    """`first`: in the first pass, and in a later one."""
    seed(1)
    loader = Loader(KINDS[kind](**how))
    state, rest, live = taken_from(loader, first)
    seed(2)
    loader.load_state_dict(state)
    assert rest_of(loader, live, first) == rest
    seed(3)
    other = Loader(KINDS[kind](**how))
    other.load_state_dict(state)
    assert rest_of(other, RepeatingLoader(other), first) == rest


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "stream"])
def test_any_number_of_workers_goes_on_with_what_others_draw(kind: str) -> None:
    made = [{"num_workers": n, "persistent_workers": keeps} for n, keeps in ((1, False), (3, False), (2, True))]
    for before, after in itertools.permutations(made, 2):
        seed(1)
        state, rest, _ = taken_from(Loader(KINDS[kind](**before)), 15)
        seed(2)
        other = Loader(KINDS[kind](**after))
        other.load_state_dict(state)
        assert [batch.tolist() for batch in other] == rest, (before, after)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "stream"])
def test_batches_are_those_of_the_loader_itself(kind: str) -> None:
    """And the process's generators are then where it would leave them."""
    found = []
    for behind in (lambda loader: loader, Loader):
        seed(1)
        passes = behind(KINDS[kind]())
        found.append(([[batch.tolist() for batch in passes] for _ in range(2)], torch.rand(1).item()))
    assert found[0] == found[1]


class Processes(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def test_workers_that_persist_are_the_same_in_every_pass() -> None:
    loader = Loader(DataLoader(Processes(), 1, num_workers=2, persistent_workers=True))
    first, second = ({batch.item() for batch in loader} for _ in range(2))
    next(iter(loader))  # a pass that is left
    assert first == second == {batch.item() for batch in loader} and len(first) == 2


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


def test_a_class_of_loaders_whose_workers_persist_is_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.warns(UserWarning, match="Own makes its passes itself.*Make it with persistent_workers=False"):
        Loader(Own(Rows(), 2, num_workers=1, persistent_workers=True))
    for loader in (Own(Rows(), 2, num_workers=1), Own(Rows(), 2), DataLoader(Rows(), 2, num_workers=1)):
        Loader(loader)
    assert not recwarn.list
