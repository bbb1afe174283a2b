"""What an engine tells."""

from __future__ import annotations

import copy

import pytest
import torch
from support import config, make, micro

import tessera


def batch_of(engine: tessera.Engine) -> tuple[int, int, int]:
    return engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()


def test_batch_setters() -> None:
    engine = tessera.Engine(make(), config(accumulation=2))
    engine.set_train_batch_size(16)
    assert batch_of(engine) == (16, 4, 4)
    with pytest.raises(ValueError, match="not divisible"):
        engine.set_train_batch_size(10)
    with pytest.raises(ValueError, match=r"^\[engine\] the micro batch must be >= 1, got 0"):
        engine.set_train_micro_batch_size(0)
    engine.set_train_micro_batch_size(3)
    assert batch_of(engine) == (12, 3, 4)
    for k in range(4):
        micro(engine, k)
    assert engine.global_steps == 1 and engine.global_samples == 12
    engine.global_samples = 100  # as after loading a checkpoint
    assert (engine.global_samples, engine.micro_steps, engine.global_steps) == (100, 4, 1)
    engine.destroy()


def test_getters() -> None:
    cfg = config(2, bf16=True, steps_per_print=5, gradient_clipping=0.5)
    engine = tessera.Engine(make(), cfg)
    assert engine.communication_data_type == torch.bfloat16 and engine.device == torch.device("cpu")
    assert (engine.tp_world_size, engine.dp_world_size, engine.seq_dp_world_size) == (1, 1, 1)
    assert engine.config.get("zero_optimization.leaf_module.names") == [] and engine.config.get("bf16.enabled") is True
    tree = engine.config.to_dict()
    assert tree["gradient_clipping"] == 0.5 and tree["tessera"] == engine.config.get("tessera")
    assert tessera.Config.from_dict(tree).to_dict() == tree
    with pytest.raises(tessera.ConfigError, match=r"did you mean 'zero_optimization\.stage'"):
        engine.config.get("zero_optimization.stagee")
    engine.destroy()


def test_parameters_by_number_and_what_is_lent() -> None:
    model = make()
    model.gain.requires_grad_(False)
    engine = tessera.Engine(model, config(1, wall_clock_breakdown=True, comms_logger={"enabled": True}))
    specs = engine.core.params()
    for name, param in model.named_parameters():
        number = engine.param_number(param)
        assert number is not None and specs[number].name == name
        assert engine.trains(param) == (number in engine.trained_numbers()) == (name != "gain")
    assert engine.param_number(torch.ones(1)) is None and not engine.trains(torch.ones(1))
    engine.lend(model, "mark", [1])
    assert model.mark == [1] and not hasattr(copy.deepcopy(model), "mark")
    assert engine.step_seconds == {}
    micro(engine, 0)
    assert 0 < engine.step_seconds["step"] <= engine.phase_seconds()["step"]
    assert engine.timed_calls is not None
    engine.timed_calls.reset()
    assert engine.timed_calls.totals() == []
    engine.destroy()
    assert not hasattr(model, "mark")
