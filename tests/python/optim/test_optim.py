"""Optimizers of our own."""

from __future__ import annotations

import pytest
import torch
from support import assert_close, batch, config, make, weights

import tessera


def lion(params: list[torch.Tensor], states: list[torch.Tensor], lr: float, b1: float, b2: float, wd: float) -> None:
    for p, m in zip(params, states, strict=True):
        direction = (b1 * m + (1 - b1) * p.grad).sign()
        p.data.mul_(1 - lr * wd).sub_(lr * direction)
        m.mul_(b2).add_(p.grad, alpha=1 - b2)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_lion(stage: int) -> None:
    model, plain = make(), make()
    moments = [torch.zeros_like(p) for p in plain.parameters()]
    cfg = config(stage, optimizer={"type": "Lion", "params": {"lr": 0.01, "weight_decay": 0.1}})
    engine = tessera.initialize(model=model, config=cfg)[0]
    assert type(engine.basic_optimizer) is tessera.optim.Lion
    for k in range(3):
        engine(*batch(k)).backward()
        engine.step()
        plain.zero_grad()
        plain(*batch(k)).backward()
        lion(list(plain.parameters()), moments, 0.01, 0.9, 0.99, 0.1)
    assert_close(weights(model), weights(plain))
    assert set(engine.optimizer.state[model.gain]) == {"step", "exp_avg"}
    engine.destroy()


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_fused_adam_alone(adam_w_mode: bool) -> None:
    model, plain = make(), make()
    fused = tessera.optim.FusedAdam(model.parameters(), lr=0.01, weight_decay=0.1, adam_w_mode=adam_w_mode)
    cls = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    reference = cls(plain.parameters(), lr=0.01, weight_decay=0.1)
    for k in range(3):
        for m, optimizer in ((model, fused), (plain, reference)):
            optimizer.zero_grad()
            m(*batch(k)).backward()
            optimizer.step()
    assert_close(weights(model), weights(plain))
    with pytest.raises(RuntimeError, match="amsgrad"):
        tessera.optim.FusedAdam(model.parameters(), amsgrad=True)
    with pytest.raises(ValueError, match=r"lr.*beta"):
        tessera.optim.FusedAdam(model.parameters(), lr=-1, betas=(0.9, 1.0))
