"""States of optimizers that run themselves, read and written as those of the core's rules are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import OPTIMIZERS, assert_close, config, engines, make, masters, run, same_bits, train_plain, weights

import tessera
from tessera import state

STAGES = [0, 1, 2, 3]
KEYS = {
    "rmsprop": ("square_avg", "momentum_buffer", "step"),
    "amsgrad": ("exp_avg", "max_exp_avg_sq", "step"),
    "adamax": ("exp_inf", "step"),
}


def own(stage: int, bf16: bool = False) -> dict[str, Any]:
    return config(stage, bf16=bf16, zero_allow_untested_optimizer=True)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", KEYS)
def test_full_values_are_those_of_plain_torch(kind: str, stage: int, world: int) -> None:
    plain = make()
    reference = train_plain(plain, OPTIMIZERS[kind], world, 2)

    def body(engine: tessera.Engine, rank: int) -> Any:
        run(engine, rank, 2)
        for param, expected in zip(engine.module.parameters(), plain.parameters(), strict=True):
            for key in KEYS[kind]:
                got = state.get_full_optimizer_state(engine, param, key)
                want = torch.as_tensor(reference.state[expected][key])
                assert got.dtype == torch.float32
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)
            begin, end = state.local_range(engine, param)
            local = state.get_local_optimizer_state(engine, param, KEYS[kind][0])
            full = state.get_full_optimizer_state(engine, param, KEYS[kind][0])
            assert torch.equal(local.reshape(-1), full.reshape(-1)[begin:end])

    engines(make(), world, own(stage), body, client=OPTIMIZERS[kind])


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_written_values_rule_the_next_step(stage: int, bf16: bool) -> None:
    """Two engines meet at the same states: one by training, one by writing what the other has."""
    source: dict[int, dict[str, torch.Tensor]] = {}

    def trained(engine: tessera.Engine, rank: int) -> Any:
        run(engine, rank, 3)
        named = list(engine.module.named_parameters())
        source[rank] = {
            f"{key} {name}": state.get_full_optimizer_state(engine, param, key)
            for name, param in named
            for key in KEYS["rmsprop"]
        } | masters(engine)
        run(engine, rank + 5, 1)
        return masters(engine)

    def written(engine: tessera.Engine, rank: int) -> Any:
        run(engine, rank + 7, 1)
        named = list(engine.module.named_parameters())
        for name, param in named:
            for key in KEYS["rmsprop"]:
                state.set_full_optimizer_state(engine, param, key, source[rank][f"{key} {name}"])
                assert torch.equal(state.get_full_optimizer_state(engine, param, key), source[rank][f"{key} {name}"])
            state.set_full_fp32_param(engine, param, source[rank][name])
        run(engine, rank + 5, 1)
        return masters(engine)

    wanted = engines(make(), 2, own(stage, bf16), trained, client=OPTIMIZERS["rmsprop"])
    got = engines(make(), 2, own(stage, bf16), written, client=OPTIMIZERS["rmsprop"])
    for a, b in zip(got, wanted, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("stage", STAGES)
def test_local_values_are_written(stage: int) -> None:
    def body(engine: tessera.Engine, rank: int) -> Any:
        run(engine, rank, 1)
        for param in engine.module.parameters():
            local = state.get_local_optimizer_state(engine, param, "square_avg")
            state.set_local_optimizer_state(engine, param, "square_avg", torch.full_like(local, rank + 1.0))
            full = state.get_full_optimizer_state(engine, param, "square_avg")
            begin, end = state.local_range(engine, param)
            assert torch.equal(full.reshape(-1)[begin:end], torch.full((end - begin,), rank + 1.0))
        weight = engine.module.head.weight
        if state.get_local_optimizer_state(engine, weight, "square_avg").numel() > 0:
            with pytest.raises(ValueError, match="values here, not 1000"):
                state.set_local_optimizer_state(engine, weight, "square_avg", torch.ones(1000))

    engines(make(), 2, own(stage), body, client=OPTIMIZERS["rmsprop"])


@pytest.mark.parametrize("stage", STAGES)
def test_errors_are_those_of_all_ranks(stage: int) -> None:
    """A parameter of one element belongs to one rank only: the other one has no state to look at."""

    def body(engine: tessera.Engine, rank: int) -> Any:
        gain = engine.module.gain
        assert state.get_full_optimizer_state(engine, gain, "square_avg") is None, "no step yet"
        with pytest.raises(ValueError, match="no state 'square_avg' of this parameter yet"):
            state.set_full_optimizer_state(engine, gain, "square_avg", torch.ones(1))
        run(engine, rank, 1)
        with pytest.raises(ValueError, match="RMSprop has no state 'nothing'"):
            state.get_full_optimizer_state(engine, gain, "nothing")
        with pytest.raises(ValueError, match=r"shape \[1\], the value \[2\]"):
            state.set_full_optimizer_state(engine, gain, "square_avg", torch.ones(2))
        run(engine, rank, 1)
        assert state.get_full_optimizer_state(engine, gain, "step").item() == 2

    engines(make(), 2, own(stage), body, client=OPTIMIZERS["rmsprop"])


def test_states_that_are_not_by_element() -> None:
    def body(engine: tessera.Engine, rank: int) -> Any:
        run(engine, rank, 1)
        with pytest.raises(ValueError, match=r"'row_var' is not one value for each element"):
            state.get_full_optimizer_state(engine, engine.module.head.weight, "row_var")
        assert state.get_full_optimizer_state(engine, engine.module.head.bias, "variance").shape == (3,)

    engines(make(), 2, own(0), body, client=torch.optim.Adafactor)


def test_a_frozen_parameter_has_none() -> None:
    model = make()
    model.head.bias.requires_grad_(False)
    client = OPTIMIZERS["rmsprop"](p for p in model.parameters() if p.requires_grad)
    engine = tessera.Engine(model, own(1), optimizer=client)
    run(engine, 0, 1)
    assert state.get_full_optimizer_state(engine, model.head.bias, "square_avg") is None
    assert state.get_local_optimizer_state(engine, model.head.bias, "square_avg") is None
    with pytest.raises(ValueError, match=r"parameter 'head\.bias' is not optimized"):
        state.set_full_optimizer_state(engine, model.head.bias, "square_avg", torch.ones(3))
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_states_that_a_client_brings_keep_their_order_in_memory(stage: int) -> None:
    """A convolution in channels_last: the elements of weights and states lie in another order than they are counted."""
    torch.manual_seed(0)
    plain = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    model = copy.deepcopy(plain)
    x = torch.randn(2, 3, 8, 8)
    reference, client = (OPTIMIZERS["rmsprop"](m.parameters()) for m in (plain, model))

    def step(forward: Any, optimizer: Any) -> None:
        forward(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for m, optimizer in ((plain, reference), (model, client)):
        step(m, optimizer)
    engine = tessera.Engine(model, own(stage), optimizer=client)
    brought = state.get_full_optimizer_state(engine, model.weight, "square_avg")
    assert torch.equal(brought, reference.state[plain.weight]["square_avg"])
    engine(x).square().mean().backward()
    engine.step()
    step(plain, reference)
    assert_close(weights(model), weights(plain))
    engine.destroy()
    step(plain, reference)
    step(model, client)
    assert_close(weights(model), weights(plain))
