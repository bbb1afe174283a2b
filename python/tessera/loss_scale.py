"""The loss scaler of an engine, as training code sees it."""

from __future__ import annotations

from typing import Any

from tessera import _core

__all__ = ["LossScaler"]

_COUNTERS = ("steps", "good_steps", "budget", "overridden")


class LossScaler:
    """The factor that losses are multiplied by. Every engine has one; in modes without loss scaling it is the number 1.

    `loss_scale` can be set between steps, on all ranks alike; a dynamic scale goes on from there. `override` fixes it.
    """

    def __init__(self, core: _core.Engine) -> None:
        self._core = core

    @property
    def _scaler(self) -> _core.GradScaler:
        return self._core.scaler()

    @property
    def loss_scale(self) -> float:
        """The factor of the next backward."""
        return self._scaler.scale()

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._core.set_loss_scale(float(scale))

    @property
    def cur_scale(self) -> float:
        """The loss_scale, by the name of other scalers."""
        return self.loss_scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        self.loss_scale = scale

    def override(self, scale: float) -> None:
        """A scale of your own: fixed from here on, and guarded in every mode."""
        self._core.override_loss_scale(float(scale))

    @property
    def gradient_scale(self) -> float:
        """The factor of the gradients accumulated now; step() divides by it."""
        return self._core.gradient_loss_scale()

    @property
    def needed(self) -> bool:
        """Direct backwards need engine.scale()."""
        return self._scaler.needed()

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves by itself, by overflows and good steps."""
        return self._scaler.dynamic()

    dynamic_loss_scale = dynamic

    @property
    def cur_iter(self) -> int:
        """Optimizer steps seen, skipped ones too."""
        return self._scaler.state().steps

    @property
    def scale_window(self) -> int:
        """Good steps in a row before a dynamic scale grows."""
        return self._scaler.options().window

    @property
    def scale_factor(self) -> float:
        """The factor by which a dynamic scale grows and shrinks."""
        return self._scaler.options().factor

    @property
    def min_scale(self) -> float:
        """The value that a dynamic scale never falls below."""
        return self._scaler.options().minimum

    @property
    def cur_hysteresis(self) -> int:
        """Overflows that are left before a dynamic scale shrinks."""
        return self._scaler.state().budget

    def get_scale(self) -> float:
        """loss_scale, as torch's GradScaler calls it."""
        return self.loss_scale

    def is_enabled(self) -> bool:
        """needed, as torch's GradScaler calls it."""
        return self.needed

    def state_dict(self) -> dict[str, Any]:
        """The scale and its counters, as plain numbers."""
        state = self._scaler.state()
        return {"loss_scale": state.scale} | {name: getattr(state, name) for name in _COUNTERS}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Goes on from what state_dict() gave."""
        state = _core.ScalerState()
        state.scale = float(saved["loss_scale"])
        for name in _COUNTERS:
            setattr(state, name, saved[name])
        self._core.restore_scaler(state)

    def __repr__(self) -> str:
        kind = "dynamic" if self.dynamic else "fixed"
        return f"LossScaler({kind}, {self.loss_scale:g})"
