"""Calls and parts that would train nothing, or less than it seems: an error, or one warning. What plain PyTorch trains
as well says nothing."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from support import OPTIMIZERS, Net, batch, config, engines, losses_of, make, masters, same_bits
from tessera.errors import ConfigError
from torch import nn

import tessera


@pytest.mark.parametrize("stage", range(4))
def test_an_optimizer_or_a_schedule_of_another_model(stage: int) -> None:
    other = torch.optim.AdamW(make(Net, seed=3).parameters())
    with pytest.raises(ConfigError, match="AdamW holds no parameter of the model"):
        tessera.initialize(model=make(Net), config=config(stage), optimizer=other)
    with pytest.raises(ConfigError, match="holds no parameter of the model"):
        tessera.initialize(
            model=make(Net), config=config(stage), model_parameters=copy.deepcopy(make(Net)).parameters()
        )
    model = make(Net)
    own = torch.optim.AdamW(model.parameters())
    for schedule in (
        torch.optim.lr_scheduler.LambdaLR(other, lambda _: 0.5),
        lambda _: torch.optim.lr_scheduler.StepLR(other, 1),
    ):
        with pytest.raises(ConfigError, match="of another optimizer than the engine's"):
            tessera.initialize(model=model, config=config(stage), optimizer=own, lr_scheduler=schedule)
    right = torch.optim.lr_scheduler.LambdaLR(own, lambda _: 0.5)
    scale = nn.Parameter(torch.ones(1))  # of a loss
    own.add_param_group({"params": [scale]})
    right.base_lrs.append(0.1)
    right.lr_lambdas.append(right.lr_lambdas[0])
    tessera.initialize(model=model, config=config(stage), optimizer=own, lr_scheduler=right)[0].destroy()


WITHOUT: dict[str, Any] = {
    "no parameters": (nn.Tanh, {}, "the model has no parameters"),
    "frozen": (lambda: make(Net).requires_grad_(False), {}, "all parameters of the model are frozen"),
    "callable": (
        lambda: make(Net).requires_grad_(False),
        {"optimizer": lambda groups: torch.optim.AdamW(groups)},
        "all parameters of the model are frozen",
    ),
    "none named": (lambda: make(Net), {"model_parameters": []}, "none of the parameters that the optimizer"),
}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("case", WITHOUT)
def test_an_optimizer_without_anything_to_train(case: str, stage: int, caplog: pytest.LogCaptureFixture) -> None:
    build, more, said = WITHOUT[case]
    engine = tessera.initialize(model=build(), config=config(stage), **more)[0]
    assert [f"nothing is trained: {said}" in record.message for record in caplog.records] == [True]
    with torch.no_grad():
        engine(batch(0)[0])
    engine.destroy()


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "rmsprop"])
def test_the_old_handle_of_an_optimizer(kind: str, bf16: bool, stage: int) -> None:
    """Its step() is the engine's, its zero_grad() drops what the engine has."""

    def train(engine: Any, rank: int, own: bool) -> Any:
        handle = engine if own else engine.client_optimizer
        for k in range(3):
            engine.backward(engine(*batch(50 + 10 * rank + k)))
            handle.zero_grad()
            engine.backward(engine(*batch(10 * rank + k)))
            handle.step()
        assert engine.global_steps == 3
        return masters(engine)

    cfg = config(stage, bf16=bf16, zero_allow_untested_optimizer=True)
    first, second = (
        engines(make(Net), 2, cfg, functools.partial(train, own=own), OPTIMIZERS[kind]) for own in (False, True)
    )
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_an_update_without_a_backward_is_an_error(stage: int, accumulation: int) -> None:
    """It counts nothing, and the engine goes on. A micro-step without one is a warning, once."""

    def body(engine: Any, rank: int) -> None:
        for update in range(3):
            for _ in range(accumulation - 1):
                engine.step()
            with pytest.raises(tessera.UsageError, match="no backward has reached this engine since the last update"):
                engine.step()
            assert engine.global_steps == update
            engine.backward(engine(*batch(update)))
            engine.step()
            assert engine.global_steps == update + 1

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engines(make(Net), 2, config(stage, accumulation=accumulation), body)
    said = [one for one in told if "no backward has reached" in str(one.message)]
    assert [one.filename for one in said] == [__file__] * (accumulation - 1), "it names the line that calls step()"


class Parts(nn.Module):
    """Experts, of which a step uses one; a layer that nothing uses."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))
        self.fc1 = nn.Linear(5, 5)
        if unused:
            self.fc2 = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor, which: int = 0) -> torch.Tensor:
        x = x.to(self.fc1.weight.dtype)
        return ((self.experts[which](self.fc1(x)) - y) ** 2).mean()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_a_parameter_without_a_gradient_is_named_once(stage: int, bf16: bool) -> None:
    def body(engine: Any, rank: int) -> None:
        for k in range(4):
            engine.backward(engine(*batch(k), which=k % 3))
            engine.step()

    for ranks in (1, 2):
        with pytest.warns(UserWarning) as told:
            engines(Parts(unused=True), ranks, config(stage, bf16=bf16), body)
        (text,) = [str(w.message) for w in told if "engine.step" in str(w.message)]
        assert "'fc2.weight', 'fc2.bias': trained, and without a gradient in the first step" in text
        assert "experts" not in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engines(Parts(unused=False), 2, config(stage, bf16=bf16), body)
        said = config(stage, bf16=bf16, zero={"ignore_unused_parameters": True})
        engines(Parts(unused=True), 2, said, body)


class Lists(nn.Module):
    """A list of layers whose last one nothing reaches; heads by name, of which one is never asked for; experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.heads = nn.ModuleDict({name: nn.Linear(5, 3) for name in ("a", "b", "c")})

    def forward(self, x: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x))
        x = self.experts[1](x) if step % 2 else x
        return ((self.heads["ab"[step % 2]](x) - y) ** 2).mean()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_what_several_steps_did_not_use_is_named(stage: int, ranks: int) -> None:
    """After the first step what is known then; where a list's members are used now and then, nothing."""

    def body(engine: Any, rank: int) -> None:
        for k in range(15):
            engine.backward(engine(*batch(k), step=k))
            engine.step()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engines(Lists(), ranks, config(stage), body)
    first, later = [str(w.message) for w in told if "engine.step" in str(w.message)]
    assert "without a gradient in the first step, which has left" in first and "never" not in first
    assert all(name in first for name in ("heads.b.weight", "heads.c.weight", "experts.0")) and "layers" not in first
    assert "without a gradient in all of the first 10 steps" in later
    assert later.count("'heads.c.") == 2 and later.count("'layers.2.") == 2 and later.count("'") == 8, later


@pytest.mark.parametrize("stage", range(4))
def test_what_is_right_is_silent(stage: int) -> None:
    """Accumulation, no_sync, two engines that take turns, frozen layers, gradients from outside."""

    def body(engine: Any, rank: int) -> None:
        losses_of(engine, rank, 0, 4)
        with engine.no_sync():
            engine.backward(engine(*batch(0)))
        engine.step()
        losses_of(engine, rank, 0, 1)
        for _, param in engine.module.named_parameters():
            tessera.state.set_full_grad(engine, param, torch.ones(param.shape))
        engine.step()

    model = make(Net)
    model.embed.requires_grad_(False)
    by_hand = tessera.Engine(make(Net), config(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for param in by_hand.module.parameters():
            param.grad = torch.ones_like(param)
        by_hand.step()
        engines(make(Net), 2, config(stage, accumulation=2), lambda e, rank: losses_of(e, rank, 0, 4))
        engines(make(Net), 2, config(stage), body)
        engines(model, 2, config(stage), lambda e, rank: losses_of(e, rank, 0, 4))
        first, second = (tessera.Engine(make(Net), config(stage)) for _ in range(2))
        for k in range(4):
            turn, other = (first, second) if k % 2 else (second, first)
            x, y = batch(k)
            turn.backward(((other(x) + turn(x) - y) ** 2).mean())
            turn.step()
            other.zero_grad()
