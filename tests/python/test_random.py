"""Random generators in checkpoints. What is drawn after a resume amid an epoch: engine/test_resume.py."""

from __future__ import annotations

import random
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import config, make, with_blob
from tessera.errors import IoError

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
