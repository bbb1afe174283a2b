"""Reading and writing masters, gradients and states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import assert_close, batch, config, engines, full_grads, make, plain_grads, weights

import tessera
from tessera import state, zero

ADAM = {"type": "AdamW", "params": {"lr": 0.01}}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_full_values_round_trip(stage: int, bf16: bool) -> None:
    def body(engine: tessera.Engine, rank: int) -> Any:
        engine(*batch(rank)).backward()
        engine.step()
        for param in engine.module.parameters():
            shape = param.shape
            value = torch.arange(param.numel(), dtype=torch.float32).view(shape) / 8
            state.set_full_fp32_param(engine, param, value)
            assert torch.equal(state.get_full_fp32_param(engine, param), value)
            with zero.GatheredParameters(param):
                assert torch.equal(param.float(), value.to(param.dtype).float()), "the parameter follows its master"
            for key in ("exp_avg", "exp_avg_sq"):
                state.set_full_optimizer_state(engine, param, key, value + 1)
                got = state.get_full_optimizer_state(engine, param, key)
                assert got.shape == shape and torch.equal(got, value + 1)
            assert state.get_full_optimizer_state(engine, param, "step").item() == 1
            state.set_full_optimizer_state(engine, param, "step", torch.tensor(5.0))
            assert state.get_local_optimizer_state(engine, param, "step").item() == 5
            assert engine.optimizer.state[param]["step"].item() == 5
            begin, end = state.local_range(engine, param)
            local = state.get_local_optimizer_state(engine, param, "exp_avg")
            assert torch.equal(local.reshape(-1), (value + 1).view(-1)[begin:end])
        with pytest.raises(ValueError, match="exp_avg"):
            state.get_full_optimizer_state(engine, param, "nothing")

    engines(make(), 2, config(stage, bf16=bf16, optimizer=ADAM), body)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_set_between_backward_and_step(stage: int) -> None:
    model = make()
    before = weights(model)

    def body(engine: tessera.Engine, rank: int) -> Any:
        engine(*batch(rank)).backward()
        for param in engine.module.parameters():
            assert state.get_full_grad(engine, param).shape == param.shape
            state.set_full_grad(engine, param, torch.full(param.shape, 2.0))
        engine.step()
        assert state.get_full_grad(engine, engine.module.gain) is None, "only between backward and step"
        return weights(engine.module)

    for got in engines(model, 2, config(stage), body):
        assert_close(got, {name: p - 0.2 for name, p in before.items()})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_local_values(stage: int) -> None:
    model = make()
    before = weights(model)

    def body(engine: tessera.Engine, rank: int) -> Any:
        engine(*batch(rank)).backward()
        for param in engine.module.parameters():
            local = state.get_local_grad(engine, param)
            state.set_local_grad(engine, param, torch.full_like(local, 3.0))
        engine.step()
        for param in engine.module.parameters():
            local = state.get_local_fp32_param(engine, param)
            state.set_local_fp32_param(engine, param, local + 1)
        return weights(engine.module)

    for got in engines(model, 2, config(stage), body):
        assert_close(got, {name: p - 0.3 + 1 for name, p in before.items()})


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_edits_of_parameters_are_read_back(stage: int, bf16: bool) -> None:
    """Without a step in between: loaded, edited in place, replaced through .data; and a refresh keeps them."""
    source = make(seed=5)

    def body(engine: tessera.Engine, rank: int) -> Any:
        engine(*batch(rank)).backward()
        engine.step()
        model = engine.module
        model.load_state_dict(source.state_dict())
        with torch.no_grad():
            model.gain.mul_(2)
        model.head.bias.data = torch.full_like(model.head.bias, 0.25)
        want = {name: param.detach().float().clone() for name, param in model.named_parameters()}
        assert torch.equal(want["embed.weight"], source.embed.weight.to(model.gain.dtype).float())
        begin, end = state.local_range(engine, model.head.weight)
        local = state.get_local_fp32_param(engine, model.head.weight)
        assert torch.equal(local.reshape(-1), want["head.weight"].view(-1)[begin:end])
        state.set_full_fp32_param(engine, model.embed.bias, torch.full(model.embed.bias.shape, 1 / 3))
        want["embed.bias"] = torch.full_like(want["embed.bias"], 1 / 3)
        for name, param in model.named_parameters():
            assert torch.equal(state.get_full_fp32_param(engine, param), want[name]), name
            assert torch.equal(param.float(), want[name].to(param.dtype).float()), name

    engines(make(), 2, config(stage, bf16=bf16), body)


@pytest.mark.parametrize("optimizer", [ADAM, {"type": "RMSprop", "params": {"lr": 0.01}}])
@pytest.mark.parametrize("stage", [0, 2])
def test_values_that_no_update_could_take_are_refused(stage: int, optimizer: Any) -> None:
    key = "exp_avg_sq" if optimizer is ADAM else "square_avg"

    def body(engine: tessera.Engine, rank: int) -> Any:
        engine(*batch(rank)).backward()
        engine.step()
        param = engine.module.head.weight
        begin, end = state.local_range(engine, param)
        writes = [state.set_full_optimizer_state, *([state.set_local_optimizer_state] if begin < end else [])]
        for step in (-5.0, 2.5, float("nan"), float("inf")):
            for write in writes:
                with pytest.raises(ValueError, match="'step' is a number of updates, a whole one from 0 on"):
                    write(engine, param, "step", torch.tensor(step))
        with pytest.raises(ValueError, match=f"'{key}' is a mean or sum of squares, .* and it has -0.5"):
            state.set_full_optimizer_state(engine, param, key, torch.full(param.shape, -0.5))
        state.set_full_optimizer_state(engine, param, key, torch.zeros(param.shape))
        assert state.get_full_optimizer_state(engine, param, "step").item() == 1

    engines(make(), 2, config(stage, optimizer=optimizer, zero_allow_untested_optimizer=True), body)


def test_frozen_and_foreign_parameters() -> None:
    model = make()
    model.head.bias.requires_grad_(False)
    engine = tessera.Engine(model, config(1, optimizer=ADAM))
    engine(*batch(0)).backward()
    assert state.get_full_fp32_param(engine, model.head.bias) is None
    assert state.get_full_grad(engine, model.head.bias) is None
    assert state.get_full_optimizer_state(engine, model.head.bias, "exp_avg") is None
    zeros = torch.zeros_like(model.head.bias)
    for write in (state.set_full_fp32_param, state.set_local_grad):
        with pytest.raises(ValueError, match=r"parameter 'head\.bias' is not optimized"):
            write(engine, model.head.bias, zeros)
    with pytest.raises(ValueError, match=r"parameter 'head\.bias' is not optimized"):
        state.set_full_optimizer_state(engine, model.head.bias, "exp_avg", zeros)
    with pytest.raises(ValueError, match="not a parameter of the engine"):
        state.get_full_grad(engine, torch.ones(1))
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_before_the_boundary_are_local(stage: int) -> None:
    model = make()

    def body(engine: tessera.Engine, rank: int) -> Any:
        engine(*batch(rank)).backward()
        engine.step()  # not a boundary
        return full_grads(engine)

    for rank, grads in enumerate(engines(model, 2, config(stage, accumulation=2), body)):
        assert_close(grads, plain_grads(model, 1, lambda m, _, r=rank: m(*batch(r)).backward(), scale=0.5))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_full_values_have_every_bit(stage: int, bf16: bool) -> None:
    """Also the sign of a zero."""

    def body(engine: tessera.Engine, rank: int) -> None:
        engine(*batch(rank)).backward()
        engine.step()
        param = engine.module.embed.weight
        value = torch.tensor([-0.0, 0.0, 1.0 + 2**-20, -(2.0**-140), float("inf")]).repeat(7, 1)
        state.set_full_fp32_param(engine, param, value)
        got = state.get_full_fp32_param(engine, param)
        assert torch.equal(got.view(torch.int32), value.view(torch.int32))

    engines(make(), 2, config(stage, bf16=bf16), body)
