"""Random generators that are put aside."""

from __future__ import annotations

import random
import types
from typing import Any

import pytest
import torch
from tessera._random import aside, put_random_states, random_states, try_random_states


def test_what_is_drawn_aside_leaves_no_trace() -> None:
    torch.manual_seed(1)
    random.seed(1)
    begin = torch.get_rng_state()
    states = random_states()
    first = torch.rand(3), random.random()
    with aside(begin):
        assert torch.equal(torch.rand(3), first[0])
        random.random()
    second = torch.rand(3), random.random()
    put_random_states(states)
    assert torch.equal(torch.rand(3), first[0]) and random.random() == first[1]
    assert torch.equal(torch.rand(3), second[0]) and random.random() == second[1]


@pytest.mark.parametrize("state", [[1], torch.zeros(3, dtype=torch.uint8)])
def test_a_state_that_the_device_does_not_take_is_found_without_a_trace(
    state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [torch.arange(16, dtype=torch.uint8)]

    def put(new: torch.Tensor) -> None:
        if new.numel() != 16:
            raise RuntimeError("RNG state is wrong size")
        held[0] = new

    device = types.SimpleNamespace(get_rng_state=lambda: held[0], set_rng_state=put)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    states = random_states()
    try_random_states({**states, "device": torch.ones(16, dtype=torch.uint8)})
    with pytest.raises((TypeError, RuntimeError), match=r"device|wrong size"):
        try_random_states({**states, "device": state})
    assert torch.equal(held[0], states["device"])
