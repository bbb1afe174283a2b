"""deepspeed.runtime.lr_schedules: Tessera's schedules with the attributes of DeepSpeed's, and its second beta."""

from __future__ import annotations

import math
from typing import Any

from tessera.optim.engines import momentum_of

from tessera import _core
from tessera import lr_schedules as ours

_SECOND_BETA = 0.99  # the value of DeepSpeed's OneCycle, whatever the optimizer's is

# Attribute -> the option that it shows.
_OPTIONS = {
    "warmup_min_ratio": "warmup_min_ratio",
    "cos_min_ratio": "cos_min_ratio",
    "step_size": "lr_range_test_step_size",
    "step_rate": "lr_range_test_step_rate",
    "staircase": "lr_range_test_staircase",
    "cycle_momentum": "cycle_momentum",
    "decay_lr_rate": "decay_lr_rate",
    "decay_mom_rate": "decay_mom_rate",
    "decay_step_size": "decay_step_size",
    "first_step_size": "cycle_first_step_size",
    "first_stair_count": "cycle_first_stair_count",
}


class _Shown(ours.Schedule):
    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("_options")
        key = _OPTIONS.get(name)
        if key is None or not hasattr(options, key):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(options, key)

    def _each(self, values: list[float]) -> list[float]:
        return list(values) if len(values) > 1 else list(values) * len(self.optimizer.param_groups)

    @property
    def org_lrs(self) -> list[float]:
        return list(self._base_lrs)

    @property
    def warmup_type(self) -> str:
        kind: str = self._options.warmup_type
        return kind

    @property
    def inverse_log_warm_up(self) -> float:
        return 1.0 / math.log(max(2, self.warmup_num_steps))


class WarmupLR(_Shown, ours.WarmupLR):
    """tessera.lr_schedules.WarmupLR."""

    @property
    def delta_lrs(self) -> list[float]:
        return [high - low for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(_Shown, ours.WarmupDecayLR):
    """tessera.lr_schedules.WarmupDecayLR."""

    delta_lrs = WarmupLR.delta_lrs


class WarmupCosineLR(_Shown, ours.WarmupCosineLR):
    """tessera.lr_schedules.WarmupCosineLR."""

    def get_lr_ratio(self) -> float:
        """The present rate, as a share of the optimizer's."""
        values = _core.evaluate(self._options, max(self.last_batch_iteration, -1) + 1, [1.0])
        return values.lr[0]


class LRRangeTest(_Shown, ours.LRRangeTest):
    """tessera.lr_schedules.LRRangeTest."""

    @property
    def min_lr(self) -> list[float]:
        return self._each(self._options.lr_range_test_min_lr)

    def interval_fn(self) -> float:
        interval = float(self.last_batch_iteration + 1) / self.step_size
        return math.floor(interval) if self.staircase else interval


class OneCycle(_Shown, ours.OneCycle):
    """tessera.lr_schedules.OneCycle, which with cycle_momentum sets the second of an optimizer's betas to 0.99."""

    def _apply(self, values: _core.ScheduleValues) -> None:
        super()._apply(values)
        for group in self.optimizer.param_groups if values.momentum else ():
            if "betas" in group:
                group["betas"] = (group["betas"][0], _SECOND_BETA)

    @property
    def min_lrs(self) -> list[float]:
        return self._each(self._options.cycle_min_lr)

    @property
    def max_lrs(self) -> list[float]:
        return self._each(self._options.cycle_max_lr)

    def get_mom(self) -> list[Any]:
        return momentum_of(self.optimizer.param_groups)

    @property
    def min_moms(self) -> list[tuple[float, float]]:
        return [(momentum, _SECOND_BETA) for momentum in self._each(self._options.cycle_min_mom)]

    @property
    def max_moms(self) -> list[tuple[float, float]]:
        return [(momentum, _SECOND_BETA) for momentum in self._each(self._options.cycle_max_mom)]

    @property
    def second_step_size(self) -> int:
        second = self._options.cycle_second_step_size
        return self._options.cycle_first_step_size if second is None else second

    @property
    def second_stair_count(self) -> int:
        second = self._options.cycle_second_stair_count
        return self._options.cycle_first_stair_count if second is None else second

    @property
    def total_size(self) -> int:
        return self._options.cycle_first_step_size + self.second_step_size

    @property
    def step_ratio(self) -> float:
        return self._options.cycle_first_step_size / self.total_size

    @property
    def skip_lr_decay(self) -> bool:
        return self._options.decay_step_size == 0 or self._options.decay_lr_rate == 0

    @property
    def skip_mom_decay(self) -> bool:
        return self._options.decay_step_size == 0 or self._options.decay_mom_rate == 0


_CLASSES: dict[type, type] = {
    cls.__mro__[2]: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}


def shown(schedule: Any) -> None:
    """A schedule that the configuration has made is of DeepSpeed's class from here on."""
    cls = _CLASSES.get(type(schedule))
    if cls is not None:
        schedule.__class__ = cls
        if isinstance(schedule, OneCycle) and schedule.last_batch_iteration == -1:
            schedule.apply_last()
