"""The optimizer that training code sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import batch, config, engines, make, run, same_bits, weights
from torch import nn

import tessera

STAGES = [0, 1, 2]


@pytest.mark.parametrize("stage", STAGES)
def test_optimizer_step_is_a_complete_step(stage: int) -> None:
    """Loops that call optimizer.step() and optimizer.zero_grad() train the same."""
    model, other = make(), make()

    def body(engine: tessera.Engine, rank: int) -> Any:
        for k in range(3):
            engine(*batch(10 * rank + k)).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        assert engine.global_steps == 3
        return weights(engine.module)

    def usual(engine: tessera.Engine, rank: int) -> Any:
        run(engine, rank, 3)
        return weights(engine.module)

    for got, want in zip(engines(model, 2, config(stage), body), engines(other, 2, config(stage), usual), strict=True):
        assert same_bits(got, want)


def test_wrapper_surface() -> None:
    engine, optimizer, _, _ = tessera.initialize(model=make(), config=config(1))
    assert isinstance(optimizer, torch.optim.Optimizer) and isinstance(optimizer, tessera.Optimizer)
    assert optimizer.loss_scale == 1.0 and optimizer.overflow is False and not optimizer.needs_scaler()
    assert optimizer.defaults["lr"] == 0.1 and "Parameter Group 0" in repr(optimizer)
    with pytest.raises(TypeError, match="dict"):
        optimizer.add_param_group([nn.Parameter(torch.ones(1))])
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    run(engine, 0, 1)
    assert calls == ["pre", "post"]
    assert optimizer.step(lambda: engine(*batch(0)).backward() or 7) == 7
    assert engine.global_steps == 2
    engine.destroy()
