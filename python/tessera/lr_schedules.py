"""Learning-rate schedules of the configuration. The numbers come from the core (optim/schedule.h); these classes set
them in an optimizer's param_groups. Any scheduler of torch.optim.lr_scheduler works with an engine too."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from tessera import _core

__all__ = [
    "LR_RANGE_TEST",
    "ONE_CYCLE",
    "VALID_LR_SCHEDULES",
    "WARMUP_COSINE_LR",
    "WARMUP_DECAY_LR",
    "WARMUP_LR",
    "LRRangeTest",
    "OneCycle",
    "Schedule",
    "Scheduler",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
]

WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
ONE_CYCLE = "OneCycle"
LR_RANGE_TEST = "LRRangeTest"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"

PerGroup = float | Sequence[float]
Options = _core.WarmupLR | _core.WarmupDecayLR | _core.WarmupCosineLR | _core.OneCycle | _core.LRRangeTest


class Scheduler(Protocol):
    """What engine.step() advances: a scheduler of torch.optim.lr_scheduler, a Schedule, or an object of one's own."""

    @property
    def step(self) -> Callable[..., object]:
        """Moves to the next iteration; called with the lr_kwargs of engine.step()."""
        ...

    def get_last_lr(self) -> Sequence[float | torch.Tensor]:
        """The rates that were set last."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has of it."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Goes on from what state_dict() gave."""
        ...


class Schedule:
    """Base of the schedules. `last_batch_iteration` is -1 until the first step()."""

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._options: Any = options
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        values = self._values()  # wrong options show here, before training starts
        if last_batch_iteration == -1:
            self._apply(values)
        self._last_lr = list(values.lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Moves to the next iteration, or to the one given, and sets the rates."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        values = self._values()
        self._apply(values)
        self._last_lr = list(values.lr)

    def get_lr(self) -> list[float]:
        """The rates of the current iteration, one per param group."""
        return list(self._values().lr)

    def get_last_lr(self) -> list[float]:
        """The rates that were set last."""
        return list(self._last_lr)

    @property
    def warmup_num_steps(self) -> int:
        """Steps of the warm-up, of schedules that have one."""
        return self._options.warmup_num_steps

    @property
    def total_num_steps(self) -> int:
        """Steps after which the rate stays, of schedules that end."""
        return self._options.total_num_steps

    def state_dict(self) -> dict[str, Any]:
        """The position of the schedule, as plain numbers."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from what state_dict() gave; the optimizer's groups change with the next step()."""
        self.last_batch_iteration = state_dict["last_batch_iteration"]
        self._last_lr = self.get_lr()

    def apply_last(self) -> None:
        """Gives the optimizer the values of the last step, as after step() itself."""
        self._apply(self._values())

    def _values(self) -> _core.ScheduleValues:
        return _core.evaluate(self._options, max(self.last_batch_iteration, -1) + 1, self._base_lrs)

    def _apply(self, values: _core.ScheduleValues) -> None:
        groups = self.optimizer.param_groups
        for group, lr in zip(groups, values.lr, strict=False):  # a group that was added later keeps its rate
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        for group, momentum in zip(groups, values.momentum, strict=False):
            if "betas" in group:
                group["betas"] = (momentum, *tuple(group["betas"])[1:])


def _plain(value: Any) -> Any:
    """Numbers of other packages as Python's own."""
    if isinstance(value, str | int | float):
        return value
    return list(map(_plain, value)) if isinstance(value, Sequence) else float(value)


def _options(name: str, arguments: dict[str, Any]) -> Any:
    """The core's options of the arguments of a constructor (its locals()); None is the default."""
    others = ("self", "__class__", "optimizer", "last_batch_iteration")
    given = {key: _plain(value) for key, value in arguments.items() if key not in others and value is not None}
    return _core.schedule_of(name, given)


# With the defaults.
_WARMUP, _DECAY, _COSINE = _core.WarmupLR(), _core.WarmupDecayLR(), _core.WarmupCosineLR()
_CYCLE, _RANGE = _core.OneCycle(), _core.LRRangeTest()


class _WarmsUp(Schedule):
    """Schedules between two rates for each param group."""

    @property
    def min_lrs(self) -> list[float]:
        return self._for_groups(self._options.warmup_min_lr)

    @property
    def max_lrs(self) -> list[float]:
        return self._for_groups(self._options.warmup_max_lr or self._base_lrs)

    def _for_groups(self, values: list[float]) -> list[float]:
        return list(values) if len(values) > 1 else list(values) * len(self.optimizer.param_groups)


class WarmupLR(_WarmsUp):
    """Warms up from warmup_min_lr to warmup_max_lr (default: the optimizer's lr) in warmup_num_steps, then stays
    constant."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: PerGroup = _WARMUP.warmup_min_lr,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = _WARMUP.warmup_num_steps,
        warmup_type: str = _WARMUP.warmup_type,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, _options(WARMUP_LR, locals()), last_batch_iteration)


class WarmupDecayLR(_WarmsUp):
    """Warm-up, then linearly to 0 at total_num_steps."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = _DECAY.warmup_min_lr,
        warmup_max_lr: PerGroup = _DECAY.warmup_max_lr,
        warmup_num_steps: int = _DECAY.warmup_num_steps,
        warmup_type: str = _DECAY.warmup_type,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, _options(WARMUP_DECAY_LR, locals()), last_batch_iteration)


class WarmupCosineLR(Schedule):
    """Warm-up from warmup_min_ratio to 1 times the optimizer's lr, then a cosine down to cos_min_ratio."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = _COSINE.warmup_min_ratio,
        warmup_num_steps: int = _COSINE.warmup_num_steps,
        cos_min_ratio: float = _COSINE.cos_min_ratio,
        warmup_type: str = _COSINE.warmup_type,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, _options(WARMUP_COSINE_LR, locals()), last_batch_iteration)


class OneCycle(Schedule):
    """cycle_min_lr up to cycle_max_lr and back, then decay; the first of an optimizer's betas runs the other way. An
    optimizer without betas (SGD) keeps its momentum, with a warning."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = _CYCLE.decay_lr_rate,
        cycle_first_step_size: int = _CYCLE.cycle_first_step_size,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = _CYCLE.cycle_first_stair_count,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = _CYCLE.decay_step_size,
        cycle_momentum: bool = _CYCLE.cycle_momentum,
        cycle_min_mom: PerGroup = _CYCLE.cycle_min_mom,
        cycle_max_mom: PerGroup = _CYCLE.cycle_max_mom,
        decay_mom_rate: float = _CYCLE.decay_mom_rate,
        last_batch_iteration: int = -1,
    ) -> None:
        options = _options(ONE_CYCLE, locals())
        has_betas = any("betas" in group for group in optimizer.param_groups)
        if warning := _core.warn_of_betas(options, has_betas, type(optimizer).__name__):
            warnings.warn(warning, stacklevel=2)
        super().__init__(optimizer, options, last_batch_iteration)


class LRRangeTest(Schedule):
    """Grows the rate from lr_range_test_min_lr, to find the largest that still trains."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: PerGroup = _RANGE.lr_range_test_min_lr,
        lr_range_test_step_size: int = _RANGE.lr_range_test_step_size,
        lr_range_test_step_rate: float = _RANGE.lr_range_test_step_rate,
        lr_range_test_staircase: bool = _RANGE.lr_range_test_staircase,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, _options(LR_RANGE_TEST, locals()), last_batch_iteration)
