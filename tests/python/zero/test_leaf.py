"""Leaf modules: marks, and experts that differ between ranks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support import (
    assert_close,
    batch,
    config,
    engines,
    full_grads,
    gathered,
    make,
    mse,
    plain_grads,
    same_gradients,
    weights,
)
from torch import nn

import tessera


class Experts(nn.Module):
    """Each rank takes experts of its own; some get no input at all."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(count))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> tuple[torch.Tensor, int]:
        return x + sum(torch.tanh(self.experts[i](x)) for i in chosen), len(chosen)


class Mixture(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7)
        self.layers = nn.ModuleList(Experts() for _ in range(layers))
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor, rank: int, k: int) -> torch.Tensor:
        hidden = self.embed(x.to(self.embed.weight.dtype))
        for number, layer in enumerate(self.layers):
            # Rank 0 uses all experts of some layers, the others one: gradients complete at different places.
            chosen = [0, 1, 2, 3] if rank == 0 and (number + k) % 2 else [(rank + number + k) % 4]
            hidden, _ = layer(hidden, chosen)
        return mse(self.head(hidden), y)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("min_unit", [1, 1 << 20])
def test_leaf_modules_with_different_experts_do_not_hang(world: int, min_unit: int) -> None:
    def pattern(m: Any, rank: int) -> None:
        for k in range(3):  # several backwards of one step
            m(*batch(rank + k), rank, k).backward()

    def step(engine: tessera.Engine, rank: int) -> None:
        assert gathered(engine) == []
        engine.step()
        weights(engine.module)

    leaves = {"leaf_module": {"classes": ["Experts"]}}
    cfg = config(3, zero=leaves, tessera={"min_unit_elements": min_unit})
    same_gradients(make(Mixture), world, cfg, pattern, then=step)


def test_leaf_marks() -> None:
    model, zero = make(Mixture), tessera.zero
    layers = list(model.layers)
    assert zero.get_leaf_modules(model) == []
    assert zero.set_leaf_modules(model, [Experts]) == layers
    assert zero.get_leaf_modules(model) == layers and zero.is_leaf_module(layers[0])
    assert zero.unset_leaf_modules(model, "Experts") == layers
    assert zero.set_leaf_modules(model, f"{Experts.__module__}.Experts") == layers
    zero.set_leaf_module(layers[1], False)
    assert zero.get_leaf_modules(model) == [layers[0], layers[2]]
    assert zero.set_leaf_modules_by_name(model, ["layers.1", "none"], raise_if_not_found=False) == (
        [layers[1]],
        ["none"],
    )
    assert zero.set_leaf_modules_by_suffix(model, ["ers.2"], flag=False)[0][0] is layers[2]
    assert not zero.is_leaf_module(layers[2])
    with pytest.raises(ValueError, match="Nothing"):
        zero.set_leaf_modules(model, ["Nothing"])
    with pytest.raises(ValueError, match=r"layers\.9"):
        zero.set_leaf_modules_by_name(model, ["layers.9"])
    with pytest.raises(AssertionError, match="int"):
        zero.set_leaf_modules(model, [3])


def test_a_leaf_of_the_configuration_that_matches_nothing_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(3, zero={"leaf_module": {"classes": ["Missing"], "names": "nowhere"}})
    with caplog.at_level(logging.WARNING, logger="tessera"):
        tessera.Engine(make(), cfg).destroy()
    text = caplog.text
    assert "Missing" in text and "nowhere" in text and "Mixtral" not in text


@pytest.mark.parametrize(
    ("threshold", "leaves"), [(0, []), (37, []), (38, ["layers.0", "layers.1"]), (10**6, ["layers.0", "layers.1"])]
)
def test_modules_finer_than_the_threshold_are_leaves(
    threshold: int, leaves: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A layer has 6 modules (itself, the list, four experts) with 4 * 56 elements: 37.3 each."""
    model = make(Mixture, 2)
    cfg = config(3, zero={"stage3_module_granularity_threshold": threshold})

    def body(engine: tessera.Engine, rank: int) -> Any:
        found = tessera.zero.get_leaf_modules(engine.module)
        engine(*batch(rank), rank, 0).backward()
        return [name for name, module in engine.module.named_modules() if module in found], full_grads(engine)

    want = plain_grads(model, 2, lambda m, rank: m(*batch(rank), rank, 0).backward())
    with caplog.at_level(logging.WARNING, "tessera"):
        for names, grads in engines(model, 2, cfg, body):
            assert names == leaves
            assert_close(grads, want)
    assert ("granularity" in caplog.text) == (threshold > 0 and not leaves)
