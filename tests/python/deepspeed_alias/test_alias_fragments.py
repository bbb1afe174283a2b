"""deepspeed.utils: states of a parameter without naming its engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed import utils
from support import assert_close, batch, config, engines, make, plain_grads, weights
from torch import nn

import tessera
from tessera import state

ADAM = {"type": "AdamW", "params": {"lr": 0.01}}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_full_values_are_those_of_the_engine(stage: int, bf16: bool) -> None:
    def body(engine: tessera.Engine, rank: int) -> Any:
        frozen = engine.module.embed.bias
        engine(*batch(rank)).backward()
        for param in engine.module.parameters():
            grad = utils.safe_get_full_grad(param)
            if param is frozen:
                assert grad is None and utils.safe_get_full_fp32_param(param) is None
                with pytest.raises(tessera.ConfigError, match="no engine trains"):
                    utils.safe_set_full_grad(param, torch.ones(param.shape))
                continue
            assert grad is not None and grad.dtype == torch.float32 and grad.shape == param.shape
            assert torch.equal(grad, state.get_full_grad(engine, param))
        engine.step()
        head = engine.module.head.weight
        value = torch.arange(21, dtype=torch.float32).view(3, 7) / 8
        utils.safe_set_full_fp32_param(head, value)
        utils.safe_set_full_optimizer_state(head, value + 1, "exp_avg")
        assert torch.equal(utils.safe_get_full_fp32_param(head), value)
        assert torch.equal(utils.safe_get_full_optimizer_state(head, "exp_avg"), value + 1)
        with tessera.zero.GatheredParameters(head):
            assert torch.equal(head.float(), value)
        begin, end = state.local_range(engine, head)
        local = utils.safe_get_local_fp32_param(head)
        assert local is not None and torch.equal(local.reshape(-1), value.view(-1)[begin:end])
        if stage in (1, 2):
            with pytest.raises(ValueError, match="Gradients are only available immediately after backward"):
                utils.safe_get_full_grad(head)
        else:
            assert utils.safe_get_full_grad(head) is None

    model = make()
    model.embed.bias.requires_grad_(False)
    engines(model, 2, config(stage, bf16=bf16, optimizer=ADAM), body)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_replaced_before_the_step(stage: int) -> None:
    model = make()

    def body(engine: tessera.Engine, rank: int) -> Any:
        engine(*batch(rank)).backward()
        utils.safe_update_full_grad_vectorized(engine.module.parameters(), lambda grad, param: 2 * grad)
        engine.step()
        return weights(engine.module)

    grads = plain_grads(model, 2, lambda m, r: m(*batch(r)).backward())
    want = {name: p.detach() - 0.1 * 2 * grads[name] for name, p in model.named_parameters()}
    for got in engines(model, 2, config(stage), body):
        assert_close(got, want)


@pytest.mark.parametrize("stage", [2, 3])
def test_local_values_are_set_in_stage_3(stage: int) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        head = engine.module.head.weight
        begin, end = state.local_range(engine, head)
        value = torch.full((end - begin,), 3.0)
        if stage == 2:
            with pytest.raises(AssertionError, match="stage 3 only"):
                utils.safe_set_local_fp32_param(head, value)
            return
        utils.safe_set_local_fp32_param(head, value)
        utils.safe_set_local_optimizer_state(head, value, "exp_avg")
        assert torch.equal(utils.safe_get_full_fp32_param(head), torch.full((3, 7), 3.0))
        assert torch.equal(utils.safe_get_local_optimizer_state(head, "exp_avg"), value)
        engine(*batch(rank)).backward()
        utils.safe_set_local_grad(head, torch.zeros(end - begin))
        assert torch.equal(utils.safe_get_full_grad(head), torch.zeros(3, 7))
        assert torch.equal(utils.safe_get_local_grad(head), torch.zeros(end - begin))

    engines(make(), 2, config(stage, optimizer=ADAM), body)


def test_parameters_without_an_engine() -> None:
    layer = nn.Linear(2, 2)
    assert utils.safe_get_full_fp32_param(layer.weight) is None
    engine = tessera.Engine(layer, config(1))
    assert utils.safe_get_full_fp32_param(layer.weight) is not None
    engine.destroy()
    assert utils.safe_get_full_fp32_param(layer.weight) is None
    with pytest.raises(tessera.ConfigError, match="no engine trains"):
        utils.safe_set_full_fp32_param(layer.weight, torch.ones(2, 2))
