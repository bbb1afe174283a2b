"""Random generators in checkpoints. What is drawn after a resume amid an epoch: engine/test_resume.py."""

from __future__ import annotations

import io
import random
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import config, make, with_blob
from tessera.data import Loader, RepeatingLoader
from tessera.errors import ConfigError, IoError
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, Sampler, Subset

import tessera


def test_generators_go_on_where_they_were_saved(tmp_path: Path) -> None:
    def draw() -> tuple[list[float], float, float]:
        return torch.rand(3).tolist(), random.random(), np.random.rand()

    engine = tessera.Engine(make(), config())
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1)
    engine.save_checkpoint(tmp_path, random_state=True)
    first, second = draw(), draw()
    engine.load_checkpoint(tmp_path)
    assert (draw(), draw()) == (first, second)


class Drawn(Sampler[int]):
    """Draws its order by `rng`, of what `inner` gives."""

    def __init__(self, rng: Any, inner: Any = None) -> None:
        self.rng, self.inner = rng, inner

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        order = list(range(12) if self.inner is None else self.inner)
        rng = self.rng["it"] if isinstance(self.rng, dict) else self.rng
        if isinstance(rng, torch.Generator):
            return iter([order[at] for at in torch.randperm(12, generator=rng)])
        rng.shuffle(order)
        return iter(order)


class Plain:
    """No class of torch's, in one of which it is."""

    def __init__(self, seed: int) -> None:
        self.rng = torchs(seed)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(12, generator=self.rng).tolist())


def of_class(seed: int) -> DataLoader[Any]:
    """The generator is an attribute of the sampler's class."""
    made = type("Made", (Drawn,), {"rng": random.Random(seed), "__init__": lambda self: setattr(self, "inner", None)})
    return DataLoader(range(12), 2, sampler=made())  # type: ignore[arg-type]


class Noisy(Dataset[Any]):
    """What is drawn for a row is of `rng`, where it works in this process."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> list[float]:
        return [index, self.rng.random()]


class Collating:
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def collate(self, rows: list[Any]) -> Any:
        return [rows, self.rng.random()]


def torchs(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shared(seed: int) -> DataLoader[Any]:
    """The sampler and the dataset have one generator."""
    rng = random.Random(seed)
    return DataLoader(Noisy(rng), 2, sampler=Drawn(rng), collate_fn=list)


OWN: dict[str, Callable[[int], DataLoader[Any]]] = {
    "torch": lambda seed: DataLoader(range(12), 2, sampler=Drawn(torchs(seed))),  # type: ignore[arg-type]
    "python": lambda seed: DataLoader(range(12), 2, sampler=Drawn(random.Random(seed))),  # type: ignore[arg-type]
    "numpy": lambda seed: DataLoader(range(12), 2, sampler=Drawn(np.random.default_rng(seed))),  # type: ignore[arg-type]
    "legacy numpy": lambda seed: DataLoader(range(12), 2, sampler=Drawn(np.random.RandomState(seed))),  # type: ignore[arg-type]
    "in a dict": lambda seed: DataLoader(range(12), 2, sampler=Drawn({"it": torchs(seed)})),  # type: ignore[arg-type]
    "nested": lambda seed: DataLoader(range(12), 2, sampler=Drawn(torchs(seed), Drawn(random.Random(seed)))),  # type: ignore[arg-type]
    "of no class of torch's": lambda seed: DataLoader(range(12), 2, sampler=Drawn(torchs(seed), Plain(seed))),  # type: ignore[arg-type]
    "of a class": of_class,
    "batches": lambda seed: DataLoader(range(12), batch_sampler=BatchSampler(Drawn(torchs(seed)), 2, False)),  # type: ignore[arg-type]
    "dataset": lambda seed: DataLoader(Noisy(random.Random(seed)), 2, collate_fn=list),
    "dataset of a dataset": lambda seed: DataLoader(
        ConcatDataset([Subset(Noisy(np.random.default_rng(seed)), range(12))]), 2, collate_fn=list
    ),
    "collate_fn": lambda seed: DataLoader(range(12), 2, collate_fn=Collating(random.Random(seed)).collate),  # type: ignore[arg-type]
    "shared": shared,
}


@pytest.mark.parametrize("first", [0, 2, 9])
@pytest.mark.parametrize("kind", OWN)
def test_generators_that_a_loaders_parts_have_come_back(kind: str, first: int) -> None:
    """`first`: batches before the save, 6 a pass. The next pass goes on with them, too."""
    saved, other = Loader(OWN[kind](1)), Loader(OWN[kind](2))
    torch.manual_seed(0)
    batches = RepeatingLoader(saved)
    for _ in range(first):
        next(batches)
    state = saved.state_dict() | {"begin": saved.begin, "drawn": saved.drawn}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    rest = [str(next(batches)) for _ in range(18 - first)]
    other.load_state_dict(torch.load(file, weights_only=True))
    again = RepeatingLoader(other)
    assert [str(next(again)) for _ in range(18 - first)] == rest


def test_generators_of_another_kind_are_refused() -> None:
    saved, other = Loader(OWN["python"](1)), Loader(OWN["torch"](1))
    with pytest.raises(ConfigError, match="of a random generator that it and its samplers do not have"):
        other.load_state_dict(saved.state_dict() | {"begin": saved.begin})


@pytest.mark.parametrize("state", [[1], torch.zeros(3, dtype=torch.uint8)])
def test_a_state_that_the_device_does_not_take_is_found_without_a_trace(
    state: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    held = [torch.arange(16, dtype=torch.uint8)]

    def put(new: torch.Tensor) -> None:
        if new.numel() != 16:
            raise RuntimeError("RNG state is wrong size")
        held[0] = new

    engine = tessera.Engine(make(), config())
    device = types.SimpleNamespace(get_rng_state=lambda: held[0], set_rng_state=put)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    engine.save_checkpoint(tmp_path, tag="t", random_state=True)
    saved, held[0] = held[0], torch.ones(16, dtype=torch.uint8)
    engine.load_checkpoint(tmp_path)
    assert torch.equal(held[0], saved)
    own = {"torch": torch.get_rng_state(), "python": random.getstate(), "device": state}
    with_blob(tmp_path / "t", "random-0", own)
    before = torch.rand(2), torch.get_rng_state()
    with pytest.raises(IoError, match="no state of the generators"):
        engine.load_checkpoint(tmp_path)
    assert torch.equal(held[0], saved) and torch.equal(torch.get_rng_state(), before[1])
