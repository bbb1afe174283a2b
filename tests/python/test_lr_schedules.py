"""Learning-rate schedules, alone and in an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import batch, config, make
from torch import nn

import tessera
from tessera import lr_schedules


def optimizer(lr: float = 0.1, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr, **kwargs)


def rates(schedule: Any, steps: int) -> list[float]:
    """What is in the optimizer before step 0, 1, ..."""
    seen = []
    for _ in range(steps):
        seen.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.step()
    return seen


WARMUP = {"warmup_num_steps": 4, "warmup_type": "linear"}
RANGE = {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2}
CYCLE = {"cycle_min_lr": [0.01], "cycle_max_lr": [0.1], "cycle_min_mom": [0.7], "cycle_first_step_size": 4}


# The numbers of every option are the core's (tests/optim/schedule_test.cpp); these say that the arguments reach it.
@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        ("WarmupLR", {"warmup_max_lr": 0.2, "warmup_num_steps": 2}, [0.0, 0.0, 0.2, 0.2]),
        ("WarmupLR", WARMUP, [0.0, 0.0, 0.025, 0.05, 0.075, 0.1, 0.1]),
        (
            "WarmupDecayLR",
            {"total_num_steps": 8, "warmup_max_lr": 0.1, **WARMUP},
            [0.0, 0.0, 0.025, 0.05, 0.075, 0.1, 0.075, 0.05, 0.025, 0.0, 0.0],
        ),
        (
            "WarmupCosineLR",
            {"total_num_steps": 6, "cos_min_ratio": 0.1, **WARMUP},
            [0.0, 0.0, 0.025, 0.05, 0.075, 0.055, 0.01],
        ),
        ("LRRangeTest", RANGE, [0.01, 0.015, 0.02, 0.025, 0.03, 0.035]),
        ("LRRangeTest", {"lr_range_test_staircase": True, **RANGE}, [0.01, 0.01, 0.02, 0.02, 0.03, 0.03]),
        ("OneCycle", {"cycle_second_step_size": 0, **CYCLE}, [0.01, 0.0325, 0.055, 0.0775, 0.1, 0.01, 0.01, 0.01]),
    ],
)
def test_rates(name: str, kwargs: dict[str, Any], expected: list[float]) -> None:
    base = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=0.1)
    assert rates(getattr(lr_schedules, name)(base, **kwargs), len(expected)) == pytest.approx(expected)


@pytest.mark.parametrize("change", [str.lower, str.upper, str.title])
@pytest.mark.parametrize("name", lr_schedules.VALID_LR_SCHEDULES)
def test_a_configured_schedule_is_named_in_any_letter_case(name: str, change: Any) -> None:
    params = {
        "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1},
        "WarmupDecayLR": {"total_num_steps": 8},
        "WarmupCosineLR": {"total_num_steps": 8},
    }.get(name, {})
    sections = {
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "scheduler": {"type": change(name), "params": params},
    }
    engine = tessera.Engine(make(), config(0, **sections))
    assert type(engine.lr_scheduler) is getattr(lr_schedules, name)
    engine.destroy()


def test_one_cycle_moves_momentum_the_other_way() -> None:
    base = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = lr_schedules.OneCycle(base, cycle_min_lr=0.01, cycle_max_lr=0.1, cycle_first_step_size=4)
    assert base.param_groups[0]["lr"] == pytest.approx(0.01)
    values, momenta = [], []
    for _ in range(9):
        schedule.step()
        values.append(base.param_groups[0]["lr"])
        momenta.append(base.param_groups[0]["betas"][0])
    peak = values.index(max(values))
    assert max(values) == pytest.approx(0.1) and momenta[peak] == pytest.approx(0.8) == min(momenta)
    assert values[0] < values[peak] > values[-1]
    assert base.param_groups[0]["betas"][1] == 0.999


def test_one_cycle_leaves_the_momentum_of_sgd_alone() -> None:
    base = optimizer(momentum=0.5)
    with pytest.warns(UserWarning, match="OneCycle cycles betas; SGD has none and keeps its momentum: set cycle_mom"):
        schedule = lr_schedules.OneCycle(base, cycle_min_lr=0.01, cycle_max_lr=0.1)
    schedule.step()
    assert base.param_groups[0]["momentum"] == 0.5


def test_state_dict_and_last_lr() -> None:
    schedule = lr_schedules.WarmupLR(optimizer(), warmup_max_lr=0.1, warmup_num_steps=10)
    for _ in range(4):
        schedule.step()
    assert schedule.state_dict() == {"last_batch_iteration": 3}
    other = lr_schedules.WarmupLR(optimizer(), warmup_max_lr=0.1, warmup_num_steps=10)
    other.load_state_dict(schedule.state_dict())
    assert other.get_last_lr() == schedule.get_last_lr() == schedule.get_lr()
    schedule.step()
    other.step()
    assert other.optimizer.param_groups[0]["lr"] == schedule.optimizer.param_groups[0]["lr"]
    other.step(3)
    assert other.last_batch_iteration == 3


# The texts are those of the configuration.
@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"warmup_num_steps": 0}, "warmup_num_steps must be a positive integer, got 0"),
        ({"warmup_num_steps": 2.5}, "warmup_num_steps must be a positive integer, got 2.5"),
        ({"warmup_num_steps": True}, "warmup_num_steps must be a positive integer, got true"),
        ({"warmup_type": "cubic"}, 'warmup_type must be log or linear, got "cubic"'),
        (
            {"warmup_min_lr": "x", "warmup_num_steps": 0},
            r"warmup_min_lr must be a number or a list.*; warmup_num_steps",
        ),
        ({"warmup_min_lr": [0.1, 0.2]}, "warmup_min_lr must be one number or one for each of the 1 param groups"),
    ],
)
def test_wrong_options(params: dict[str, Any], text: str) -> None:
    with pytest.raises(tessera.ConfigError, match=text):
        lr_schedules.WarmupLR(optimizer(), **params)


def test_numbers_of_other_packages_are_numbers() -> None:
    own = lr_schedules.WarmupLR(optimizer(), warmup_max_lr=0.5, warmup_num_steps=4)
    others = lr_schedules.WarmupLR(optimizer(), warmup_max_lr=torch.tensor(0.5), warmup_num_steps=torch.tensor(4))
    assert rates(own, 6) == rates(others, 6)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("kind", ["configured", "torch object", "torch configured", "callable"])
def test_the_engine_advances_the_schedule(stage: int, kind: str, recwarn: pytest.WarningsRecorder) -> None:
    """Once per optimizer step, not per micro-step; no warning from torch about the order of calls."""
    cfg = config(stage, accumulation=2)
    model = make()
    kwargs: dict[str, Any] = {}
    if kind == "configured":
        cfg["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    elif kind == "torch configured":
        cfg["scheduler"] = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
    else:
        client = torch.optim.SGD(model.parameters(), lr=0.1)
        kwargs["optimizer"] = client
        make_schedule = lambda base: torch.optim.lr_scheduler.StepLR(base, 1, 0.5)  # noqa: E731
        kwargs["lr_scheduler"] = make_schedule(client) if kind == "torch object" else make_schedule
    engine, _, _, schedule = tessera.initialize(model=model, config=cfg, **kwargs)
    assert schedule is engine.lr_scheduler and schedule is not None
    seen = []
    for k in range(8):
        engine(*batch(k)).backward()
        engine.step()
        seen.append(engine.get_lr()[0])
    halves = [0.1, 0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125, 0.00625]
    warmup = [0.0, 0.0, 0.0, 0.025, 0.025, 0.05, 0.05, 0.075]
    assert seen == pytest.approx(warmup if kind == "configured" else halves)
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]
    engine.destroy()


def test_lr_kwargs_reach_the_schedule() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def step(self, **kwargs: Any) -> None:
            self.seen.append(kwargs)

    recorder = Recorder()
    engine = tessera.Engine(make(), config(), lr_scheduler=recorder)
    engine(*batch(0)).backward()
    engine.step(lr_kwargs={"metrics": 3})
    assert recorder.seen == [{"metrics": 3}]
    engine.lr_scheduler = None  # clients take it away
    engine(*batch(0)).backward()
    engine.step()
    assert len(recorder.seen) == 1
    engine.destroy()


def test_a_schedule_over_the_returned_optimizer() -> None:
    """The wrapper is a torch optimizer: schedulers of torch accept it."""
    engine, optimizer, _, _ = tessera.initialize(model=make(), config=config(2))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine(*batch(0)).backward()
    engine.step()
    schedule.step()
    assert engine.get_lr() == [0.05]
    engine.destroy()


def test_names() -> None:
    assert sorted(lr_schedules.VALID_LR_SCHEDULES) == [
        "LRRangeTest",
        "OneCycle",
        "WarmupCosineLR",
        "WarmupDecayLR",
        "WarmupLR",
    ]
