"""Optimizers of torch on the kernels of the core, and those that run themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import OPTIMIZERS, assert_close, batch, config, engines, make, run, run_ranks, train_plain, weights

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


NAN = float("nan")
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("AdamW", {"lr": -1.0}, "lr must be >= 0, got -1"),
    ("AdamW", {"lr": NAN}, "lr must be >= 0, got nan"),
    ("Adam", {"betas": (0.9, 1.0)}, r"beta 1 must be in \[0, 1\), got 1"),
    ("AdamW", {"weight_decay": NAN}, "weight_decay must be >= 0, got nan"),
    ("SGD", {"momentum": -1.0}, "momentum must be >= 0, got -1"),
    ("Lion", {"lr": -1.0}, "lr must be >= 0, got -1"),
    ("Lamb", {"lr": NAN}, "lr must be >= 0, got nan"),
]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [*STAGES, 3])
@pytest.mark.parametrize("kind, wrong, says", WRONG)
def test_hyper_parameters_have_the_bounds_of_the_configuration(
    kind: str, wrong: dict[str, Any], says: str, stage: int, world: int
) -> None:
    """Of groups that torch looks at no more: as the engine is built, before a step, and of one that is added."""
    cls = getattr(tessera.optim, kind, None) or getattr(torch.optim, kind)
    models = [make() for _ in range(world)]

    def body(rank: int, group: tessera.Group) -> None:
        model = models[rank]
        optimizer = cls(model.parameters(), lr=0.01)
        good = dict(optimizer.param_groups[0])
        of_core = kind != "Lamb"  # else the client's own, which is asked before its first step
        if of_core:
            optimizer.param_groups[0].update(wrong)
            with pytest.raises(tessera.ConfigError, match=says):
                tessera.Engine(model, config(stage), optimizer=optimizer, group=group)
            optimizer.param_groups[0].update(good)
        engine = tessera.Engine(model, config(stage), optimizer=optimizer, group=group)
        before = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine(*batch(rank)).backward()
        if rank == world - 1:  # all ranks have the error of one
            optimizer.param_groups[0].update(wrong)
        with pytest.raises((tessera.ConfigError, tessera.UsageError), match=says):
            engine.step()
        optimizer.param_groups[0].update({key: good[key] for key in wrong})
        assert all(torch.equal(value, before[name]) for name, value in engine.module_state_dict().items())
        engine.step()
        if of_core:
            engine.module.late = torch.nn.Linear(2, 2)
            with pytest.raises(tessera.ConfigError, match=says):
                engine.optimizer.add_param_group({"params": list(engine.module.late.parameters()), **wrong})
        engine.destroy()

    run_ranks(world, body)


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
