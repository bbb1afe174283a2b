"""Optimizers without an engine: torch's numbers and state dicts, 16-bit parameters, layouts, errors."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import assert_close, batch, config, engines, make, weights
from torch import nn

import tessera
from tessera import optim

Make = Callable[[Any], torch.optim.Optimizer]

# Ours, and torch's with the same numbers.
PAIRS: dict[str, tuple[Make, Make]] = {
    "adam": (
        lambda p: optim.Adam(p, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1),
    ),
    "adamw": (lambda p: optim.AdamW(p, lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)),
    "maximize": (
        lambda p: optim.Adam(p, lr=0.01, maximize=True, decoupled_weight_decay=True, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.01, maximize=True, decoupled_weight_decay=True, weight_decay=0.1),
    ),
    "fused": (
        lambda p: optim.FusedAdam(p, lr=0.01, weight_decay=0.1, adam_w_mode=False),
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    ),
    "fused adamw": (
        lambda p: optim.FusedAdam(p, lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    ),
    "adagrad": (
        lambda p: optim.Adagrad(p, 0.05, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.2),
        lambda p: torch.optim.Adagrad(p, 0.05, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.2),
    ),
}
# Every rule, for what needs no peer.
RULES: dict[str, Make] = {name: ours for name, (ours, _) in PAIRS.items()} | {
    "lion": lambda p: optim.Lion(p, lr=0.01, weight_decay=0.1)
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0},
        {"params": [p for name, p in named if "bias" not in name], "lr": 0.02},
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int = 3) -> None:
    """`gain` has a gradient in every second step only."""
    for step in range(first, first + count):
        optimizer.zero_grad()
        model(*batch(step)).backward()
        if step % 2:
            model.gain.grad = None
        optimizer.step()


@pytest.mark.parametrize("kind", PAIRS)
def test_numbers_and_state_dicts_are_torchs(kind: str) -> None:
    """Trained by both, states exchanged in the middle: both ways, in memory and as saved."""
    ours, theirs = PAIRS[kind]
    model, plain = make(), make()
    mine, reference = ours(groups(model)), theirs(groups(plain))
    for optimizer, net in ((mine, model), (reference, plain)):
        train(net, optimizer, 0)
    assert_close(weights(model), weights(plain))
    mine_dict, reference_dict = copy.deepcopy(mine.state_dict()), copy.deepcopy(reference.state_dict())
    assert mine_dict["state"].keys() == reference_dict["state"].keys()
    for key, state in reference_dict["state"].items():
        assert mine_dict["state"][key].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(mine_dict["state"][key][name], value, rtol=1e-5, atol=1e-6)
    again, other = theirs(groups(model)), ours(groups(plain))
    again.load_state_dict(mine_dict)
    other.load_state_dict(reference_dict)
    for optimizer, net in ((again, model), (other, plain)):
        assert [group["lr"] for group in optimizer.param_groups] == [mine.param_groups[0]["lr"], 0.02]
        train(net, optimizer, 3)
    assert_close(weights(model), weights(plain))


def lion(params: list[torch.Tensor], states: list[torch.Tensor], lr: float, b1: float, b2: float, wd: float) -> None:
    for p, m in zip(params, states, strict=True):
        direction = (b1 * m + (1 - b1) * p.grad).sign()
        p.data.mul_(1 - lr * wd).sub_(lr * direction)
        m.mul_(b2).add_(p.grad, alpha=1 - b2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["adam", "lion", "adagrad"])
def test_engines_run_the_rule_of_an_optimizer_that_is_given(kind: str, stage: int) -> None:
    """Whose groups stay the program's."""
    plain, make_it = make(), RULES[kind]
    alone = make_it(plain.parameters())

    def body(engine: tessera.Engine, rank: int) -> dict[str, torch.Tensor]:
        for step in range(3):
            engine.optimizer.param_groups[0]["lr"] = 0.01 * step
            engine(*batch(step)).backward()
            engine.step()
        return weights(engine.module)

    for step in range(3):
        alone.param_groups[0]["lr"] = 0.01 * step
        alone.zero_grad()
        plain(*batch(step)).backward()
        alone.step()
    for found in engines(make(), 2, config(stage, gradient_clipping=0.0), body, client=make_it):
        assert_close(found, weights(plain))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_lion(stage: int) -> None:
    model, plain = make(), make()
    moments = [torch.zeros_like(p) for p in plain.parameters()]
    cfg = config(stage, optimizer={"type": "Lion", "params": {"lr": 0.01, "weight_decay": 0.1}})
    engine = tessera.initialize(model=model, config=cfg)[0]
    assert type(engine.basic_optimizer) is optim.Lion
    for k in range(3):
        engine(*batch(k)).backward()
        engine.step()
        plain.zero_grad()
        plain(*batch(k)).backward()
        lion(list(plain.parameters()), moments, 0.01, 0.9, 0.99, 0.1)
    assert_close(weights(model), weights(plain))
    assert set(engine.optimizer.state[model.gain]) == {"step", "exp_avg"}
    engine.destroy()


@pytest.mark.parametrize("kind", RULES)
def test_an_engine_gives_the_same_bits(kind: str) -> None:
    model, served = make(), make()
    alone, client = RULES[kind](groups(model)), RULES[kind](groups(served))
    engine = tessera.initialize(model=served, optimizer=client, config=config(0, gradient_clipping=0.0))[0]
    assert engine.core.options().rule.name != "External"
    for step in range(3):
        for net, optimizer in ((model, alone), (engine, engine)):
            net(*batch(step)).backward()
            optimizer.step()
        alone.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), served.parameters(), strict=True))
    engine.destroy()
    for mine, theirs in zip(alone.state_dict()["state"].values(), client.state_dict()["state"].values(), strict=True):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", RULES)
def test_16_bit_parameters_are_updated_in_fp32(kind: str, dtype: torch.dtype) -> None:
    low = nn.Parameter(torch.randn(33, 7).to(dtype))
    high = nn.Parameter(low.detach().float())
    optimizer, reference = RULES[kind]([low]), RULES[kind]([high])
    for _ in range(4):
        low.grad = torch.randn(33, 7).to(dtype)
        high.data.copy_(low)
        high.grad = low.grad.float()
        optimizer.step()
        reference.step()
        assert torch.equal(low, high.to(dtype))
    saved = copy.deepcopy(optimizer.state_dict())
    again = RULES[kind]([low])
    again.load_state_dict(saved)
    for name, value in reference.state[high].items():
        for state in (optimizer.state[low], again.state[low]):
            assert state[name].dtype == torch.float32 and torch.equal(state[name], value), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_is_asked_for_and_repeats(dtype: torch.dtype) -> None:
    def run(seed: int, split: int, **more: Any) -> torch.Tensor:
        """20 steps of 1e-4 each from 1; after `split` a new optimizer takes the states."""
        params = [nn.Parameter(torch.ones(5000, dtype=dtype)) for _ in range(2)]
        make = lambda: optim.AdamW(params, lr=1e-4, weight_decay=0.0, seed=seed, **more)  # noqa: E731
        optimizer = make()
        for step in range(20):
            if step == split:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = make()
                optimizer.load_state_dict(saved)
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
        return torch.cat([p.detach().float() for p in params])

    assert run(0, 7).eq(1).all()  # nearest: each step is lost
    drawn = run(0, 7, stochastic_rounding=True)
    assert abs(drawn.mean() - (1 - 20e-4)) < 2e-4 and not torch.equal(drawn[:5000], drawn[5000:])
    assert torch.equal(drawn, run(0, 13, stochastic_rounding=True))
    assert not torch.equal(drawn, run(1, 7, stochastic_rounding=True))


def test_parameters_of_any_layout() -> None:
    start = torch.randn(4, 3, 2, 2)
    layouts: list[Callable[[], torch.Tensor]] = [
        lambda: torch.empty(4, 3, 2, 2),
        lambda: torch.empty(4, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        lambda: torch.empty(2, 2, 3, 4).permute(3, 2, 1, 0),
        lambda: torch.zeros(4, 3, 2, 9)[..., 2:8:3],
    ]
    params = [nn.Parameter(layout().copy_(start)) for layout in layouts]
    optimizer = optim.Adam([{"params": params}])
    for step in range(3):
        grad = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(step))
        for param in params:
            param.grad = grad.clone()
        optimizer.step()
    for param in params:
        assert torch.equal(param, params[0]) and not torch.equal(param, start)
        assert torch.equal(optimizer.state[param]["exp_avg_sq"], optimizer.state[params[0]]["exp_avg_sq"])
    before = params[1].stride()
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    optimizer.load_state_dict(torch.load(buffer, weights_only=True))
    optimizer.step()
    assert params[1].stride() == before and all(torch.equal(param, params[0]) for param in params)


def test_closures_schedules_and_copies() -> None:
    model = make()
    optimizer = optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(*batch(0))
        loss.backward()
        return loss

    losses = [optimizer.step(closure)]
    schedule.step()
    losses.append(optimizer.step(closure))
    assert losses[1] < losses[0] and float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.005)
    other = copy.deepcopy(optimizer)
    assert other.param_groups[0]["decoupled_weight_decay"] and other.state_dict()["state"].keys()
    params = list(other.param_groups[0]["params"])
    params[0].grad = torch.ones_like(params[0])
    other.step()


def test_a_backward_that_saved_a_weight_notices_the_update() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    loss = model(torch.randn(2, 3)).sum()
    optimizer = optim.Adam(model.parameters())
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kind", RULES)
def test_what_is_refused_changes_nothing(kind: str) -> None:
    good = nn.Parameter(torch.ones(3))
    good.grad = torch.ones(3)

    def refused(param: nn.Parameter, says: str) -> None:
        optimizer = RULES[kind]([{"params": [good]}, {"params": [nn.Parameter(torch.ones(1)), param]}])
        with pytest.raises(tessera.ConfigError, match=f"parameter 1 of group 1 {says}"):
            optimizer.step()
        assert good.eq(1).all()

    sparse = nn.Embedding(4, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    refused(sparse.weight, "has a sparse gradient")
    for param, says in (
        (nn.Parameter(torch.ones(2, dtype=torch.float64)), "is Double; served are Float, BFloat16 and Half"),
        (nn.Parameter(torch.ones(2, device="meta")), "is on meta"),
    ):
        if kind.startswith("fused") and says == "is on meta":
            continue  # on a device that has kernels
        param.grad = torch.ones_like(param)
        refused(param, says)


def test_flags_and_states_of_others_are_refused_by_name() -> None:
    param = nn.Parameter(torch.ones(2))
    for cls in (optim.Adam, optim.AdamW, optim.FusedAdam):
        with pytest.raises(RuntimeError, match=rf"\[{cls.__name__}\] amsgrad"):
            cls([param], amsgrad=True)
        optimizer = cls([param])
        with pytest.raises(RuntimeError, match="amsgrad"):
            optimizer.load_state_dict(torch.optim.Adam([param], amsgrad=True).state_dict())
    momentum = torch.optim.SGD([param], lr=1, momentum=0.9)
    param.grad = torch.ones(2)
    momentum.step()
    with pytest.raises(tessera.ConfigError, match=r"parameter 0 has no exp_avg, exp_avg_sq; it has momentum_buffer"):
        optim.Adam([param]).load_state_dict(momentum.state_dict())
    with pytest.raises(ValueError, match=r"\[FusedAdam\] lr must be >= 0, got -1; beta 1 must be in \[0, 1\), got 1$"):
        optim.FusedAdam([param], lr=-1, betas=(0.9, 1.0))
    with pytest.raises(tessera.ConfigError, match=r"\[Adagrad\] lr_decay must be >= 0, got -1$"):
        optim.Adagrad([param], lr_decay=-1)
    with pytest.raises(tessera.ConfigError, match=r"\[Lion\] weight_decay must be >= 0, got -0.1$"):
        optim.Lion([param], weight_decay=-0.1)
    with pytest.raises(tessera.ConfigError, match="betas must be two numbers, got 1"):
        optim.Lion([param], betas=(0.9,))  # type: ignore[arg-type]
    with pytest.raises(tessera.ConfigError, match=r"stochastic_rounding of Lion"):
        model = make()
        client = optim.Lion(model.parameters(), stochastic_rounding=True)
        tessera.initialize(model=model, optimizer=client, config=config(1))
