"""Learning-rate schedules, alone and in an engine."""

from __future__ import annotations

import math
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


def test_warmup_log() -> None:
    schedule = lr_schedules.WarmupLR(optimizer(), warmup_min_lr=0.0, warmup_max_lr=0.1, warmup_num_steps=10)
    expected = [0.0] + [0.1 * math.log(i + 1) / math.log(10) for i in range(10)] + [0.1] * 3
    assert rates(schedule, 14) == pytest.approx(expected)


def test_warmup_linear_takes_the_optimizers_rate() -> None:
    schedule = lr_schedules.WarmupLR(optimizer(0.3), warmup_num_steps=4, warmup_type="linear")
    assert rates(schedule, 7) == pytest.approx([0.0, 0.0, 0.075, 0.15, 0.225, 0.3, 0.3])


def test_warmup_decay() -> None:
    schedule = lr_schedules.WarmupDecayLR(
        optimizer(), total_num_steps=8, warmup_max_lr=0.1, warmup_num_steps=4, warmup_type="linear"
    )
    expected = [0.0, 0.0, 0.025, 0.05, 0.075, 0.1, 0.075, 0.05, 0.025, 0.0, 0.0]
    assert rates(schedule, 11) == pytest.approx(expected)


def test_warmup_cosine() -> None:
    schedule = lr_schedules.WarmupCosineLR(
        optimizer(0.2), total_num_steps=8, warmup_num_steps=4, warmup_type="linear", cos_min_ratio=0.1
    )
    values = rates(schedule, 10)
    assert values[:5] == pytest.approx([0.0, 0.0, 0.05, 0.1, 0.15])
    assert values[5:9] == pytest.approx([0.2 * (0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2) for k in (1, 2, 3, 4)])


def test_range_test() -> None:
    schedule = lr_schedules.LRRangeTest(optimizer(), lr_range_test_min_lr=0.01, lr_range_test_step_size=2)
    values = rates(schedule, 6)
    assert values[0] == pytest.approx(0.01) and values[-1] > values[1]
    stairs = lr_schedules.LRRangeTest(
        optimizer(), lr_range_test_min_lr=0.01, lr_range_test_step_size=2, lr_range_test_staircase=True
    )
    assert len(set(rates(stairs, 6))) <= 4


def test_one_cycle_moves_momentum_the_other_way() -> None:
    base = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = lr_schedules.OneCycle(base, cycle_min_lr=0.01, cycle_max_lr=0.1, cycle_first_step_size=4)
    assert base.param_groups[0]["lr"] == pytest.approx(0.01)
    values, momenta = [], []
    for _ in range(9):
        schedule.step()
        values.append(base.param_groups[0]["lr"])
        momenta.append(base.param_groups[0]["betas"][0])
        assert schedule.get_mom() == [base.param_groups[0]["betas"]]
    peak = values.index(max(values))
    assert max(values) == pytest.approx(0.1) and momenta[peak] == pytest.approx(0.8) == min(momenta)
    assert values[0] < values[peak] > values[-1]
    assert base.param_groups[0]["betas"][1] == 0.999


def test_one_cycle_leaves_the_momentum_of_sgd_alone() -> None:
    base = optimizer(momentum=0.5)
    with pytest.warns(UserWarning, match="keeps its momentum"):
        schedule = lr_schedules.OneCycle(base, cycle_min_lr=0.01, cycle_max_lr=0.1)
    schedule.step()
    assert base.param_groups[0]["momentum"] == 0.5 and schedule.get_mom() == [0.5]


def test_one_cycle_without_a_second_half_falls_at_once() -> None:
    base = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = lr_schedules.OneCycle(
        base,
        cycle_min_lr=[0.01],
        cycle_max_lr=[0.1],
        cycle_min_mom=[0.7],
        cycle_first_step_size=4,
        cycle_second_step_size=0,
    )
    values = rates(schedule, 8)
    assert max(values) == pytest.approx(0.1) and values[-1] == pytest.approx(0.01)


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


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"warmup_num_steps": 0}, "warmup_num_steps"),
        ({"warmup_num_steps": 2.5}, "warmup_num_steps"),
        ({"warmup_type": "cubic"}, "warmup_type"),
        ({"warmup_min_lr": [0.1, 0.2]}, "warmup_min_lr"),
    ],
)
def test_wrong_options(params: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        lr_schedules.WarmupLR(optimizer(), **params)


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
