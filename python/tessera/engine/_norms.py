"""Norms of an engine's gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from tessera.engine._look import own_error_first, told
from tessera.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from tessera.engine._engine import Engine


class EngineNorms:
    """What an Engine says of the norm, and clips to it."""

    def grad_norm(self) -> float:
        """Global L2 norm of the gradients as they are now, before a step. Collective."""
        engine = cast("Engine", self)
        engine._trainable("grad_norm")
        return self._on_all(engine.core.grad_norm)

    def norm_contribution(self, without: Iterable[nn.Parameter] = ()) -> float:
        """This rank's part of the square of grad_norm(): those of all ranks add up to it, replicas counted once,
        without a loss scale. `without`: parameters that do not count, as copies of what another engine counts.
        ValueError, on all ranks, where step() would be one. Collective."""
        engine = cast("Engine", self)
        engine._trainable("norm_contribution")
        numbers = [engine._index[id(param)] for param in without]
        return self._on_all(lambda fault: engine.core.norm_contribution(numbers, fault))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """torch.nn.utils.clip_grad_norm_ for gradients that are not in p.grad; between a backward and step(). Returns
        the norm that they had. Those with inf or NaN are left to step(), which clips to gradient_clipping (1.0, if the
        configuration does not say) in any case, without a pass of its own. All ranks give the same, else it is a
        ValueError on all of them. Collective."""
        engine = cast("Engine", self)
        engine._trainable("clip_grad_norm_")
        if engine._updates_in_backward:
            raise UsageError(
                "[engine.clip_grad_norm_] tessera.update_in_backward has used the gradients when it is called; set "
                "gradient_clipping and tessera.clip, or switch update_in_backward off"
            )
        problem: Exception | None = None
        if norm_type != 2:
            problem = NotImplementedError(f"[engine.clip_grad_norm_] norm_type {norm_type} is not served; use 2.0")
        elif not max_norm >= 0:
            problem = ConfigError(f"[engine.clip_grad_norm_] max_norm must be a number >= 0, got {max_norm}")
        limit = 0.0 if problem else float(max_norm)
        norm = self._on_all(lambda fault: engine.core.clip_grad_norm(limit, fault), problem)
        return torch.tensor(norm, device=engine.device)

    def _on_all(self, norm: Callable[[str], float], problem: Exception | None = None) -> float:
        """What keeps this rank from it the others hear where all meet."""
        engine = cast("Engine", self)
        fault, found = ("", None) if problem else engine._look_before_norm()
        problem = problem or found
        try:
            with own_error_first(problem):
                return norm(told(problem) if problem else fault)
        finally:
            engine._settle_joined()
