"""Norms of an engine's gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from tessera import _core
from tessera.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from tessera.engine._engine import Engine


class EngineNorms:
    """What an Engine says of the norm, and clips to it."""

    def grad_norm(self) -> float:
        """Global L2 norm of the gradients as they are now, before a step. Collective."""
        engine = cast("Engine", self)
        engine._trainable("grad_norm").check_kept()
        engine._follow_params()
        try:
            return engine.core.grad_norm()
        finally:
            engine._settle_joined()

    def norm_contribution(self, without: Iterable[nn.Parameter] = ()) -> float:
        """This rank's part of the square of grad_norm(): those of all ranks add up to it, replicas counted once,
        without a loss scale. `without`: parameters that do not count, as copies of what another engine counts.
        Collective."""
        engine = cast("Engine", self)
        engine._trainable("norm_contribution").check_kept()
        engine._follow_params()
        try:
            return engine.core.norm_contribution([engine._index[id(param)] for param in without])
        finally:
            engine._settle_joined()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """torch.nn.utils.clip_grad_norm_ for gradients that are not in p.grad; between a backward and step(). Returns
        the norm that they had. Those with inf or NaN are left to step(), which clips to gradient_clipping (1.0, if the
        configuration does not say) in any case, without a pass of its own. Collective."""
        engine = cast("Engine", self)
        if engine._updates_in_backward:
            raise UsageError(
                "[engine.clip_grad_norm_] tessera.update_in_backward has used the gradients when it is called; set "
                "gradient_clipping and tessera.clip_by_unit, or switch update_in_backward off"
            )
        if norm_type != 2:
            raise NotImplementedError(f"[engine.clip_grad_norm_] norm_type {norm_type} is not served; use 2.0")
        if not max_norm >= 0:
            raise ConfigError(f"[engine.clip_grad_norm_] max_norm must be a number >= 0, got {max_norm}")
        norm = self.grad_norm()
        scale = max_norm / (norm + 1e-6)
        if scale < 1 and math.isfinite(norm):
            for number in engine._optimized:
                view = engine.core.local_view(number, _core.Quantity.Gradient)
                if view is not None:  # a copy, where gradients live in host memory
                    engine.core.set_local(number, _core.Quantity.Gradient, view.detach().mul_(scale))
        return torch.tensor(norm, device=engine.device)
