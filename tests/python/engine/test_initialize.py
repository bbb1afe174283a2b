"""tessera.initialize: arguments, results and errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import batch, config, make
from torch import nn

import tessera


def test_four_results_and_a_module() -> None:
    model = make()
    engine, optimizer, loader, schedule = tessera.initialize(model=model, config=config())
    assert isinstance(engine, nn.Module) and engine.module is model
    assert optimizer is engine.optimizer and loader is None and schedule is None
    assert [name for name, _ in engine.named_parameters()] == [f"module.{name}" for name, _ in model.named_parameters()]
    assert set(engine.state_dict()) == {f"module.{name}" for name in model.state_dict()}
    assert engine.train().training and not engine.eval().module.training
    engine.destroy()


def test_arguments_by_position_and_all_names() -> None:
    import inspect

    parameters = inspect.signature(tessera.initialize).parameters
    own = [name for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    assert [name for name in parameters if name not in own] == ["model", "config"]
    assert own == [
        "optimizer",
        "model_parameters",
        "training_data",
        "lr_scheduler",
        "collate_fn",
        "group",
        "sequence_parallel",
        "tensor_parallel",
        "unit_policy",
        "engine_type",
    ]
    with pytest.raises(AttributeError):
        _ = tessera.initialize(make(), config())[0].no_such_attribute


def wrong_arguments() -> list[Any]:
    cfg = config()
    model = make()
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1), 1)
    param = model.gain
    return [
        pytest.param({"config": cfg}, "model", id="no model"),
        pytest.param({"model": 3, "config": cfg}, "Module", id="model of another type"),
        pytest.param({"model": model}, "no configuration", id="no config"),
        pytest.param({"model": model, "config": 3}, "dict", id="config of another type"),
        pytest.param({"model": model, "config": "no such file"}, "base64", id="neither file nor base64"),
        pytest.param({"model": model, "config": cfg, "optimizer": 3}, "optimizer", id="optimizer of another type"),
        pytest.param(
            {"model": model, "config": cfg, "optimizer": lambda groups: 3}, "callable returned", id="callable's result"
        ),
        pytest.param({"model": model, "config": cfg, "lr_scheduler": scheduler}, "lr_scheduler", id="lonely scheduler"),
        pytest.param(
            {"model": model, "config": cfg, "lr_scheduler": 3}, "lr_scheduler", id="scheduler of another type"
        ),
        pytest.param({"model": model, "config": cfg, "model_parameters": [param, param]}, "more than once", id="twice"),
        pytest.param(
            {"model": model, "config": {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}},
            "train_batch_size",
            id="batch triple",
        ),
        pytest.param({"model": model, "config": {"gradient_accumulation_steps": 2}}, "batch", id="no batch size"),
        pytest.param(
            {"model": model, "config": config(optimizer={"type": "Adam", "params": {"max_grad_norm": 1.0}})},
            "gradient_clipping",
            id="max_grad_norm",
        ),
        pytest.param(
            {"model": model, "config": config(optimizer={"type": "Nonsense"})}, "Nonsense", id="unknown optimizer"
        ),
        pytest.param(
            {"model": model, "config": config(optimizer={"type": "Adam", "params": {"lrr": 1.0}})},
            "lrr",
            id="unknown optimizer argument",
        ),
        pytest.param(
            {"model": model, "config": config(scheduler={"type": "Nonsense"})}, "Nonsense", id="unknown scheduler"
        ),
        pytest.param(
            {"model": model, "config": cfg, "sequence_parallel": 2}, "sequence_parallel_size 2", id="no ranks"
        ),
        pytest.param(
            {"model": model, "config": config(zero_optimization={"stage": 1, "stagee": 2})}, "stagee", id="unknown key"
        ),
        pytest.param({"model": model, "config": config(zero_optimization={"stage": 7})}, "stage", id="stage 7"),
    ]


@pytest.mark.parametrize(("kwargs", "text"), wrong_arguments())
def test_wrong_arguments(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(tessera.ConfigError, match=text) as caught:
        tessera.initialize(**kwargs)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, AssertionError)
    assert str(caught.value).startswith("[")


@pytest.mark.parametrize("bf16", [False, True])
def test_without_optimizer_forward_only(bf16: bool) -> None:
    cfg = config(bf16=bf16)
    del cfg["optimizer"]
    plain = make()
    engine, optimizer, _, _ = tessera.initialize(model=copy.deepcopy(plain), config=cfg, model_parameters=[])
    assert optimizer is None and engine.get_lr() == []
    x, y = batch(0)
    with torch.no_grad():
        torch.testing.assert_close(engine(x, y), plain(x, y), rtol=0.05 if bf16 else 1e-5, atol=0.05 if bf16 else 1e-6)
    assert engine.module.gain.dtype == (torch.bfloat16 if bf16 else torch.float32)
    loss = engine(x, y)
    for call in (lambda: engine.backward(loss), engine.step, lambda: engine.scale(loss), engine.grad_norm):
        with pytest.raises(tessera.UsageError, match="no optimizer"):
            call()
    engine.destroy()


@pytest.mark.parametrize(
    "more",
    [
        {"graph_harvesting": True},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
        {"optimizer": {"type": "MuAdam"}},
    ],
)
def test_what_is_not_served_is_refused_by_name(more: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"graph_harvesting|stage|offload_optimizer|MuAdam"):
        tessera.initialize(model=make(), config=config(**more))
