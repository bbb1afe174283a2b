"""Optimizers from arguments and configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Factory, assert_close, batch, config, make, mse, run, train_plain, weights

import tessera


@pytest.mark.parametrize("stage", [1, 2])
def test_sharded_stages_require_an_optimizer(stage: int) -> None:
    cfg = config(stage)
    del cfg["optimizer"]
    with pytest.raises(tessera.ConfigError, match="requires an optimizer"):
        tessera.initialize(model=make(), config=cfg)


def test_parameter_forms() -> None:
    model = make()
    groups = [
        {"params": model.embed.parameters(), "lr": 0.5},
        {"params": []},
        {"params": [model.gain, model.head.weight]},
    ]
    engine = tessera.initialize(model=model, model_parameters=iter(groups), config=config(1))[0]
    assert engine.get_lr() == [0.5, 0.1]
    frozen = model.head.bias.detach().clone()
    mse(engine(batch(0)[0]), batch(0)[1]).backward()
    engine.step()
    assert torch.equal(model.head.bias, frozen), "not among model_parameters"
    engine.destroy()


def test_optimizer_callable_wins_over_config() -> None:
    engine, optimizer, _, _ = tessera.initialize(
        model=make(), optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.7), config=config(2)
    )
    assert engine.get_lr() == [0.7] and isinstance(optimizer, tessera.Optimizer)
    assert type(engine.basic_optimizer) is torch.optim.AdamW and optimizer.optimizer is engine.basic_optimizer
    engine.destroy()


CONFIGURED = [
    (
        {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    ),
    (
        {"type": "adam", "params": {"lr": 0.01, "weight_decay": 0.1}},
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    ),
    (
        {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False, "betas": [0.8, 0.9]}},
        lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.9), weight_decay=0.1),
    ),
    (
        {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True, "amsgrad": True}},
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0, amsgrad=True),
    ),
    (
        {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True, "adam_w_mode": 0, "weight_decay": 0.1}},
        lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    ),
    ({"type": "Adagrad", "params": {"lr": 0.01}}, lambda p: torch.optim.Adagrad(p, 0.01)),
    ({"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}, lambda p: torch.optim.SGD(p, 0.01, momentum=0.9)),
    ({"type": "NAdam", "params": {"lr": 0.01}}, lambda p: torch.optim.NAdam(p, 0.01)),
]


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize(("section", "factory"), CONFIGURED, ids=lambda v: v["type"] if isinstance(v, dict) else "")
def test_configured_optimizers(section: dict[str, Any], factory: Factory, stage: int) -> None:
    model, plain = make(), make()
    if "weight_decay" not in section["params"] and section["params"].get("torch_adam"):
        section = {**section, "params": {**section["params"], "weight_decay": 0}}
    train_plain(plain, factory, 1, 3)
    cfg = config(stage, optimizer=section, zero_allow_untested_optimizer=True)
    engine = tessera.initialize(model=model, config=cfg)[0]
    run(engine, 0, 3)
    assert_close(weights(model), weights(plain))
    engine.destroy()


# Of every type; tests/optim/optimizer_test.cpp has them of the C++ front end.
ZEROS = ("weight_decay", "momentum", "dampening", "nesterov", "lr_decay", "initial_accumulator_value", "maximize")
DEFAULTS: dict[str, Any] = dict.fromkeys(ZEROS, 0) | {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
DEFAULTS |= {"decoupled": True, "bias_correction": True}


@pytest.mark.parametrize(
    ("kind", "own"),
    [("Adam", {}), ("AdamW", {}), ("SGD", {}), ("Adagrad", {"lr": 0.01, "eps": 1e-10}), ("Lion", {"beta2": 0.99})],
)
def test_defaults_are_those_of_the_cpp_front_end(kind: str, own: dict[str, Any]) -> None:
    engine = tessera.initialize(model=make(), config=config(1, optimizer={"type": kind, "params": {}}))[0]
    got = engine.core.groups()[0]
    found = {name: getattr(got, name) for name in dir(got) if not name.startswith("_")}
    assert found == DEFAULTS | own
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 2])
def test_untested_optimizers_are_gated(stage: int) -> None:
    factory: Factory = lambda p: torch.optim.RMSprop(p)  # noqa: E731
    model = make()
    for optimizer in (factory(model.parameters()), factory):
        with pytest.raises(tessera.ConfigError, match="zero_allow_untested_optimizer"):
            tessera.Engine(model, config(stage), optimizer=optimizer)
    with pytest.raises(tessera.ConfigError, match="zero_allow_untested_optimizer"):
        tessera.Engine(make(), config(stage, optimizer={"type": "RMSprop"}))
    for kind, says in ((torch.optim.LBFGS, "needs a closure"), (torch.optim.SparseAdam, "sparse gradients only")):
        with pytest.raises(NotImplementedError, match=f"{kind.__name__} .*{says}"):
            tessera.Engine(make(), config(stage), optimizer=kind)


# The core's text, with the path, of every type that it knows; tests/config/params_test.cpp has more of them.
@pytest.mark.parametrize(
    ("kind", "params", "says"),
    [
        ("RAdam", {"betaz": [0.9, 0.99]}, r'params\.betaz: unknown parameter; did you mean "betas"\?'),
        ("Rprop", {"etas": [2, 3]}, r"params\.etas: must have 0 < etas\[0\] < 1 < etas\[1\], got 2 and 3"),
        ("Adamax", {"lr": -1}, r"params\.lr: must be a number >= 0.0, got -1"),
        ("Adam", {"torch_adam": True, "amsgrad": True, "eps": -1}, r"params\.eps: must be a number >= 0.0, got -1"),
    ],
)
def test_wrong_parameters_of_torchs_optimizers_are_named(kind: str, params: dict[str, Any], says: str) -> None:
    with pytest.raises(tessera.ConfigError, match=rf"(?s)^\[config\].*optimizer\.{says}"):
        tessera.initialize(model=make(), config=config(0, optimizer={"type": kind, "params": params}))


@pytest.mark.parametrize("kind", ["Adadelta", "RMSprop", "Rprop", "SGD", "Lion"])
def test_choices_of_an_implementation_change_nothing(kind: str) -> None:
    native = kind in ("SGD", "Lion")
    choices = {"capturable": True, "fused": True, "set_grad_none" if native else "differentiable": True}
    results = []
    for params in ({"lr": 0.01}, {"lr": 0.01, **choices}):
        model = make()
        engine = tessera.initialize(model=model, config=config(0, optimizer={"type": kind, "params": params}))[0]
        run(engine, 0, 2)
        results.append(weights(model))
        engine.destroy()
    assert_close(*results)
