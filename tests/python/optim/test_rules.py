"""Optimizers of torch on the kernels of the core, and those that run themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import OPTIMIZERS, assert_close, batch, config, engines, make, run, train_plain, weights

import tessera

STAGES = [0, 1, 2]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_client_optimizers_equal_plain_torch(kind: str, stage: int, world: int) -> None:
    model = make()
    plain = copy.deepcopy(model)
    train_plain(plain, OPTIMIZERS[kind], world, 4)

    def body(engine: tessera.Engine, rank: int) -> Any:
        assert engine.basic_optimizer is engine.client_optimizer
        assert engine.optimizer.param_groups is engine.client_optimizer.param_groups
        assert (engine.optimizer is engine.client_optimizer) == (stage == 0)
        run(engine, rank, 4)
        return weights(engine.module)

    cfg = config(stage, zero_allow_untested_optimizer=True)
    for got in engines(model, world, cfg, body, client=OPTIMIZERS[kind]):
        for name, value in weights(plain).items():
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["adamw", "sgd", "rmsprop"])
def test_changed_learning_rates_act_at_once(stage: int, kind: str) -> None:
    model = make()
    groups = lambda m: [  # noqa: E731
        {"params": [p for n, p in m.named_parameters() if "bias" in n], "weight_decay": 0.0},
        {"params": [p for n, p in m.named_parameters() if "bias" not in n], "lr": 0.5},
    ]
    cls = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}[kind]
    plain = copy.deepcopy(model)
    reference, client = cls(groups(plain), lr=0.01), cls(groups(model), lr=0.01)
    cfg = config(stage, zero_allow_untested_optimizer=True)
    engine, optimizer, _, _ = tessera.initialize(model=model, optimizer=client, config=cfg)
    for k, rate in enumerate((0.02, 0.0, 0.3)):
        optimizer.param_groups[1]["lr"] = reference.param_groups[1]["lr"] = rate
        assert engine.get_lr() == [0.01, rate]
        engine(*batch(k)).backward()
        engine.step()
        plain(*batch(k)).backward()
        reference.step()
        reference.zero_grad()
    assert_close(weights(model), weights(plain))
    engine.destroy()
