"""What makes torch forget a parameter's gradient accumulator inside a forward, set_() and register_parametrization()
above all: the training is that of plain PyTorch, in every stage and precision, of trained and frozen weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support import Block, Net, batch, config, engines, gathered, make, masters, plain_grads, same_bits, same_gradients
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import tessera


class Plus(nn.Module):
    """What PEFT does to a weight while its module runs (lora.ParamWrapper), but for the cache, which threads share."""

    def __init__(self, delta: torch.Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.delta


@contextmanager
def plus(module: nn.Module, delta: torch.Tensor) -> Iterator[None]:
    trained = module.weight.requires_grad
    parametrize.register_parametrization(module, "weight", Plus(delta))
    module.parametrizations.weight.original.requires_grad_(trained)
    try:
        yield
    finally:
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)


class Way(Block):
    """The weight is used twice, by two accumulators where `way` makes torch forget the first."""

    def __init__(self, way: str, frozen: bool) -> None:
        super().__init__(7)
        self.way = way
        self.down, self.up = nn.Linear(7, 2, bias=False), nn.Linear(2, 7, bias=False)
        self.linear.weight.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "recomputed":
            return checkpoint(self.twice, x, use_reentrant=False)
        if self.way == "re-entrant":
            return checkpoint(self.twice, x, use_reentrant=True)
        return self.twice(x)

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.once(self.once(x))

    def once(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "plain":
            return x + torch.tanh(self.linear(self.norm(x)) + self.norm(x) @ (self.up.weight @ self.down.weight).T)
        if self.way == "set":
            with torch.no_grad():
                self.linear.weight.set_(self.linear.weight)
            weight = self.linear.weight * 1  # what is saved has a version of its own
            return x + torch.tanh(nn.functional.linear(self.norm(x), weight, self.linear.bias))
        with plus(self.linear, self.up.weight @ self.down.weight):
            return x + torch.tanh(self.linear(self.norm(x)))


class Model(Net):
    def __init__(self, way: str, frozen: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Way(way, frozen) for _ in range(2))


def pattern(model: Any, rank: int) -> None:
    for k in range(2):
        model(*batch(10 * rank + k)).backward()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", ["set", "parametrized", "recomputed", "re-entrant"])
def test_gradients_are_those_of_plain_pytorch(way: str, frozen: bool, stage: int, ranks: int) -> None:
    def nothing_left(engine: Any, rank: int) -> None:
        engine.step()
        assert engine.was_step_applied()
        assert stage < 3 or ranks == 1 or gathered(engine) == []

    same_gradients(
        make(Model, way, frozen), ranks, config(stage, tessera={"min_unit_elements": 1}), pattern, then=nothing_left
    )


MODES: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "offload": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


class Sets(Net):
    sets = False

    def features(self, x: torch.Tensor) -> torch.Tensor:
        if self.sets:
            for param in self.parameters():
                with torch.no_grad():
                    param.set_(param)
        return super().features(x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", range(3))
def test_masters_keep_their_bits(mode: str, stage: int) -> None:
    """set_() counts as a write for torch, and is none: what a 16-bit weight has not of its master stays."""
    zero = {"offload_optimizer": {"device": "cpu"}} if mode == "offload" and stage > 0 else {}
    cfg = config(stage, zero=zero, optimizer={"type": "AdamW", "params": {"lr": 1e-4}}, **MODES[mode])

    def train(sets: bool) -> list[dict[str, torch.Tensor]]:
        def body(engine: Any, rank: int) -> dict[str, torch.Tensor]:
            engine.module.sets = sets
            for k in range(3):
                engine.backward(engine(*batch(2 * k + rank)))
                engine.step()
                assert engine.was_step_applied()
            return masters(engine)

        return engines(make(Sets), 2, cfg, body)

    assert same_bits(train(True)[0], train(False)[0])


def test_writes_are_seen_as_before() -> None:
    def body(engine: Any, rank: int) -> None:
        weight = engine.module.embed.weight

        def write(*_: Any) -> None:
            with torch.no_grad():
                weight.mul_(2)

        for _ in range(2):
            handle = engine.module.embed.register_forward_pre_hook(write)
            with pytest.raises(RuntimeError, match=r"in-place modification of parameter 'embed\.weight'"):
                engine(*batch(rank))
            handle.remove()
            engine(*batch(rank)).backward()
            engine.step()

    engines(make(), 2, config(3), body)


def test_a_parametrization_for_good() -> None:
    """Of a partitioned model, between steps, inside a region."""

    def body(engine: Any, rank: int) -> dict[str, torch.Tensor]:
        if engine.module.head.weight.requires_grad:
            with tessera.zero.GatheredParameters(engine.module.head.weight):
                parametrize.register_parametrization(engine.module.head, "weight", Plus(torch.ones(3, 7)))
        for _ in range(2):
            engine(*batch(rank)).backward()
        grad = tessera.state.get_full_grad(engine, engine.module.head.parametrizations.weight.original)
        assert grad is not None
        return {"grad": grad.clone()}

    def plain(model: nn.Module, rank: int) -> None:
        with torch.no_grad():
            model.head.weight += 1
        for _ in range(2):
            model(*batch(rank)).backward()

    want = plain_grads(make(), 2, plain)["head.weight"]
    for stage in (0, 3):
        for got in engines(make(), 2, config(stage), body):
            torch.testing.assert_close(got["grad"], want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stage", range(4))
def test_hooks_of_the_users_own(stage: int) -> None:
    """A first register_hook() takes the engine's hook off the tensor."""

    class Hooked(Sets):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            if not self.embed.weight._backward_hooks:
                self.embed.weight.register_hook(lambda grad: grad * 3)
            return super().features(x)

    same_gradients(make(Hooked), 2, config(stage), pattern)
