"""Loaders."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import batch, config, engines, make
from tessera.data import Loader, RepeatingLoader, make_loader
from tessera.errors import ConfigError
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    get_worker_info,
)

import tessera


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if index >= self.size:
            raise IndexError
        return index


def test_ranks_share_a_dataset() -> None:
    def body(engine: tessera.Engine, rank: int) -> Any:
        loader = engine.data_loader(Numbers(32))
        assert loader.batch_size == 4 and len(loader) == 4
        first, second = [b.tolist() for b in loader], [b.tolist() for b in loader]
        assert first != second, "a new order every epoch"
        return [number for numbers in first for number in numbers]

    parts = engines(make(), 2, config(), body)
    assert sorted(parts[0] + parts[1]) == list(range(32))


def test_training_data_and_collate() -> None:
    data = [tuple(t[0] for t in batch(k)) for k in range(8)]
    engine, _, loader, _ = tessera.initialize(
        model=make(),
        config=config(),
        training_data=data,
        collate_fn=lambda rows: [torch.stack(c) for c in zip(*rows, strict=True)],
    )
    assert loader is engine.training_dataloader and len(loader) == 2
    for x, y in loader:
        engine(x, y).backward()
        engine.step()
    assert engine.global_steps == 2
    engine.destroy()


def test_routes_and_options() -> None:
    engine = tessera.Engine(make(), config(dataloader_drop_last=True))
    ordered = engine.data_loader(Numbers(10), batch_size=3, route="eval")
    assert [b.tolist() for b in ordered] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    for wrong in (3, {1, 2}):
        with pytest.raises(ValueError, match="Dataset"):
            engine.data_loader(wrong)
    with pytest.raises(ValueError, match="route"):
        engine.data_loader(Numbers(3), route="nowhere")
    engine.destroy()


def test_repeating_loader() -> None:
    loader = make_loader(Numbers(4), batch_size=2, rank=0, world_size=1, route="eval")
    numbers = [b.tolist() for b in itertools.islice(RepeatingLoader(loader), 5)]
    assert numbers == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]


@pytest.mark.parametrize("before", [None, 0, 2, 6, 7])
@pytest.mark.parametrize("taken", [0, 3, 5, 6])
def test_a_loader_goes_on_where_it_was(taken: int, before: int | None) -> None:
    """`before`: batches that a live iterator has given when the position is loaded; None: it begins after that."""

    def loader() -> Loader:
        return make_loader(list(range(24)), batch_size=2, rank=0, world_size=2)

    plain, saved = loader(), loader()
    everything = [batch.tolist() for _ in range(3) for batch in plain]
    passes = RepeatingLoader(saved)
    for _ in range(taken):
        next(passes)
    resumed = loader()
    after = RepeatingLoader(resumed) if before is not None else None
    for _ in range(before or 0):
        next(after)  # type: ignore[arg-type]
    resumed.load_state_dict(saved.state_dict())
    after = after or RepeatingLoader(resumed)
    assert [next(after).tolist() for _ in range(9)] == everything[taken : taken + 9]


def test_ranks_are_those_of_the_sampler() -> None:
    """Also inside a batch sampler; beside another number they are refused."""
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(24), 2, 1)
    batches = BatchSampler(sampler, 2, drop_last=False)
    for loader in (DataLoader(Numbers(24), 2, sampler=sampler), DataLoader(Numbers(24), batch_sampler=batches)):
        saved, resumed, given = Loader(loader), Loader(loader), Loader(loader, world_size=2)
        passes = iter(saved)
        next(passes)
        assert saved.state_dict()["samples"] == (4 if loader.batch_size else 2)
        place, rest = saved.state_dict(), [batch.tolist() for batch in passes]
        for other in (resumed, given):
            other.load_state_dict(place)
            assert [batch.tolist() for batch in other] == rest
        with pytest.raises(ConfigError, match="world_size is 4, but the sampler deals samples out to 2 ranks"):
            Loader(loader, world_size=4)


class Named(DataLoader[int]):
    def __iter__(self) -> Any:
        return (("mine", batch.tolist()) for batch in super().__iter__())


class Lengthless(Dataset[int]):
    """Its rows are what a worker finds in the dataset there."""

    scale = 3

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> int:
        worker = get_worker_info()
        return index * (self if worker is None else worker.dataset).scale


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_class_of_loaders_does_stays(workers: int) -> None:
    plain, saved, resumed = (Loader(Named(Numbers(8), 2, num_workers=workers)) for _ in range(3))
    everything = list(plain)
    passes = iter(saved)
    assert everything[0] == next(passes) == ("mine", [0, 1])
    resumed.load_state_dict(saved.state_dict())
    assert list(resumed) == everything[1:] and list(passes) == everything[1:]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_of_no_length_is_asked_in_its_workers(workers: int) -> None:
    saved, resumed = (
        Loader(DataLoader(Lengthless(), batch_sampler=[[0, 1], [2]], num_workers=workers)) for _ in range(2)
    )
    passes = iter(saved)
    assert next(passes).tolist() == [0, 3]
    resumed.load_state_dict(saved.state_dict())
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in passes] == [[6]]


def test_generators_of_its_own_go_on_between_passes_too() -> None:
    def loader(seed: int) -> Loader:
        return Loader(DataLoader(Numbers(8), 2, shuffle=True, generator=torch.Generator().manual_seed(seed)))

    plain, resumed = loader(0), loader(1)
    for _ in range(2):
        list(plain)
    place = plain.state_dict() | {"begin": plain.begin}
    resumed.load_state_dict(place)
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in plain]
    without = Loader(DataLoader(Numbers(8), 2))
    with pytest.raises(ConfigError, match=r"1 random generators of its own .*, and this one has 0"):
        without.load_state_dict(place)
    assert without.state_dict() == {"epoch": 0, "samples": 0} and len(list(without)) == 4


def test_a_place_in_a_larger_dataset_is_refused() -> None:
    saved, smaller = (make_loader(Numbers(size), batch_size=2, rank=0, world_size=1) for size in (9, 4))
    smaller.load_state_dict(saved.state_dict())
    next(iter(saved))
    with pytest.raises(tessera.ConfigError, match="a dataset of 9 examples, and this one has 4"):
        smaller.load_state_dict(saved.state_dict())
    assert len(list(smaller)) == 2


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(24))


@pytest.mark.parametrize("persistent", [False, True])
def test_a_place_in_a_stream_is_for_as_many_workers(persistent: bool) -> None:
    def loader(workers: int) -> Loader:
        return Loader(DataLoader(Stream(), 2, num_workers=workers, persistent_workers=persistent and workers > 0))

    saved, same, fewer, none = loader(2), loader(2), loader(1), loader(0)
    for other in (same, fewer, none, Loader(DataLoader(Numbers(24), 2))):
        other.load_state_dict(saved.state_dict())  # of no pass yet
    passes = iter(saved)
    next(passes)
    state = saved.state_dict()
    assert state == {"epoch": 0, "samples": 2, "workers": 2}
    same.load_state_dict(state)
    assert [batch.tolist() for batch in same] == [batch.tolist() for batch in passes]
    for workers, other in enumerate((none, fewer)):
        with pytest.raises(ConfigError, match=f"a stream that 2 workers shared, and here num_workers is {workers}"):
            other.load_state_dict(state)
        assert other.state_dict() == {"epoch": 0, "samples": 0}
    with pytest.raises(ConfigError, match=r"a place in a stream .*, and the dataset here is none"):
        Loader(DataLoader(Numbers(24), 2)).load_state_dict(state)


@pytest.mark.parametrize(
    ("make_it", "says"),
    [
        (lambda: Loader([1, 2]), r"a torch.utils.data.DataLoader, got list; .*engine.data_loader"),  # type: ignore[arg-type]
        (lambda: Loader(Loader(DataLoader(Numbers(4)))), "got Loader"),  # type: ignore[arg-type]
        *(
            (lambda value=value: Loader(DataLoader(Numbers(4)), world_size=value), "world_size must be a number from 1")
            for value in (0, -1, 1.5, True, "2")
        ),
        *(
            (lambda value=value: Loader(DataLoader(Numbers(4)), value), "first_epoch must be a number from 0")
            for value in (-1, None, "1")
        ),
    ],
)
def test_a_loader_of_what_cannot_be_one_is_refused(make_it: Callable[[], Loader], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_it()


BAD_STATES: list[tuple[Any, str]] = [
    ({}, "has no 'epoch'"),
    ({"epoch": 0}, "has no 'samples'"),
    ([1], "is a dict, .*, got list"),
    (None, "is a dict, .*, got NoneType"),
    *(({"epoch": value, "samples": 0}, "'epoch' .*no number that can be") for value in ("1", 1.0, None, True, 2**70)),
    *(({"epoch": 0, "samples": 0, key: "1"}, f"'{key}' .*no number that can be") for key in ("size", "workers")),
    *(
        ({"epoch": 0, "samples": 0} | bad, "which no loader has given")
        for bad in ({"epoch": -1}, {"samples": -2}, {"size": -1}, {"samples": 26, "size": 24}, {"workers": -1})
    ),
    ({"epoch": 0, "samples": 2, "begin": 3}, "'begin' .* is a dict, got int"),
    ({"epoch": 0, "samples": 2, "begin": {}}, "no state of the random generators"),
    ({"epoch": 0, "samples": 2, "drawn": 3}, "are a list, got int"),
    ({"epoch": 0, "samples": 2, "drawn": [torch.zeros(3)]}, "the state of a loader has one .* damaged"),
    ({"epoch": 0, "samples": 2, "drawn": [{"python": (3, (), None)}]}, "the state of a loader has one .* damaged"),
]


@pytest.mark.parametrize(("state", "says"), BAD_STATES)
def test_states_that_no_loader_has_given_are_refused(state: Any, says: str) -> None:
    generator = torch.Generator().manual_seed(1)
    loader = Loader(DataLoader(Numbers(24), 2, shuffle=True, generator=generator))
    before = generator.get_state()
    with pytest.raises(ConfigError, match=says):
        loader.load_state_dict(state)
    assert loader.state_dict() == {"epoch": 0, "samples": 0} and torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_no_place_is_behind_the_end_of_a_dataset(ranks: int, drop_last: bool) -> None:
    """Where the last round is not full; a sampler of one's own may give more than there are."""
    saved, other = (make_loader(Numbers(9), batch_size=2, rank=0, world_size=ranks, drop_last=drop_last) for _ in "ab")
    for _ in saved:
        state = saved.state_dict()
        assert state["samples"] <= state["size"] == 9
        other.load_state_dict(state)
    assert list(other) == []
    more = [Loader(DataLoader(Numbers(4), 2, sampler=RandomSampler(Numbers(4), True, 10))) for _ in "ab"]
    for _ in itertools.islice(more[0], 4):
        more[1].load_state_dict(more[0].state_dict())
    assert len(list(more[1])) == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("later", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_other_ranks_give_what_is_left_once_each(ranks: int, later: int, workers: int) -> None:
    size = 24

    def loaders(world: int, batch_size: int) -> list[Loader]:
        of: dict[str, Any] = {"batch_size": batch_size, "world_size": world, "num_workers": workers}
        return [make_loader(Numbers(size), rank=rank, **of) for rank in range(world)]

    given: list[int] = []
    for loader in loaders(ranks, 2):
        assert len(list(loader)) * 2 == size // ranks
        given += [number for numbers in itertools.islice(loader, 2) for number in numbers.tolist()]
        state = loader.state_dict()
    for loader in loaders(later, 3):
        loader.load_state_dict(state)
        passes = iter(loader)
        given += next(passes, torch.empty(0)).tolist()
        loader.load_state_dict(loader.state_dict())  # a resume of what was resumed
        given += [number for numbers in passes for number in numbers.tolist()]
        assert loader.state_dict() == {"epoch": 2, "samples": 0}
    assert set(given) == set(range(size)) and len(given) < size + later  # but those that fill the last round


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 7, 23, 24])
def test_what_is_left_of_an_epoch_comes_once_on_any_ranks(size: int, drop_last: bool) -> None:
    """Runs of other ranks and batches, some of which give nothing, share an epoch. The last deals out what is left as a
    fresh epoch of it: with fewer samples twice than there are ranks, or without those that make no batch of every
    rank."""
    draw = random.Random(size)
    for _ in range(60):
        runs = [(draw.randint(1, 4), draw.randint(1, 3), draw.randint(0, 2)) for _ in range(4)]
        state: dict[str, Any] = {"epoch": draw.randint(0, 2), "samples": 0}
        given: set[int] = set()
        for number, (ranks, batch_size, rounds) in enumerate(runs, 1):
            kind: dict[str, Any] = {"batch_size": batch_size, "world_size": ranks, "drop_last": drop_last}
            loaders = [make_loader(Numbers(size), rank=rank, **kind) for rank in range(ranks)]
            part: list[int] = []
            for loader in loaders:
                loader.load_state_dict(state)
                for numbers in itertools.islice(loader, rounds if number < len(runs) else None):
                    part += numbers.tolist()
            left = set(range(size)) - given
            each = len(left) // ranks // batch_size * batch_size if drop_last else -(-len(left) // ranks)
            taken = each if number == len(runs) else min(each, rounds * batch_size)
            assert set(part) <= left or (not drop_last and len(left) < ranks * taken), (runs, number)
            assert len(part) == taken * ranks and len(set(part) & left) == min(len(part), len(left)), (runs, number)
            states = [loader.state_dict() for loader in loaders]
            assert states == [states[0]] * ranks
            if states[0]["epoch"] != state["epoch"]:  # it had less than its rounds
                break
            given, state = given | set(part), states[0]
