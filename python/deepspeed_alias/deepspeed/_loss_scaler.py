"""deepspeed.runtime.fp16.loss_scaler: what lies in checkpoints of DeepSpeed, and the class of an engine's scaler."""

from __future__ import annotations

from typing import Any

import tessera.loss_scale
import torch

from deepspeed._lazy import NotServed


class _Kind(type):
    """The scalers of engines are instances, too."""

    def __instancecheck__(cls, instance: object) -> bool:
        if isinstance(instance, tessera.loss_scale.LossScaler):
            return cls is LossScalerBase or instance.dynamic == (cls is DynamicLossScaler)
        return super().__instancecheck__(instance)


class LossScalerBase(metaclass=_Kind):
    """A factor for losses."""

    dynamic = False

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.loss_scale

    def scale_gradient(self, module: Any, grad_in: Any, grad_out: Any) -> tuple[torch.Tensor, ...]:
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def update_scale(self, overflow: bool) -> None:
        """A fixed scale stays."""


class LossScaler(LossScalerBase):
    """A fixed factor."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)

    def has_overflow(self, params: Any) -> bool:
        return False


class DynamicLossScaler(LossScalerBase):
    """The state of a factor that an engine moves."""

    dynamic = True

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        super().__init__(init_scale)
        self.cur_iter, self.last_overflow_iter, self.scale_factor = 0, -1, 2.0
        self.scale_window, self.min_scale = scale_window, min_scale
        self.delayed_shift = self.cur_hysteresis = delayed_shift
        self.consecutive_hysteresis, self.raise_error_at_min_scale = consecutive_hysteresis, raise_error_at_min_scale
        self.dtype = dtype

    def update_scale(self, overflow: bool) -> None:
        raise NotServed("[loss_scaler] a dynamic scale moves in the engine only (section `fp16`), by its step()")
