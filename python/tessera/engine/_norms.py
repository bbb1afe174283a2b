"""Norms of an engine's gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from tessera import _core
from tessera.engine._joining import Joining
from tessera.engine._look import Look, fault_text, own_error_first
from tessera.engine._updates import Updates


class Norms:
    """The norms that an engine gives, and clips to."""

    def __init__(self, updates: Updates, joining: Joining, look: Look, device: torch.device) -> None:
        self._updates, self._joining, self._look, self._device = updates, joining, look, device
        self._core = updates.core

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of `value` over the ranks that gradients are averaged over, without autograd. Collective."""
        self._core.check_one_thread("sum")
        return _core.sum_over_batch(self._core.mesh(), value)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of `value` over the ranks that gradients are averaged over, without autograd. Collective."""
        self._core.check_one_thread("mean")
        return _core.mean_over_batch(self._core.mesh(), value)

    def token_mean(self, sum: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """A loss of masked tokens: `sum` of this rank's losses (a scalar) and `count` of its tokens become the loss
        whose gradient, averaged over ranks as every step averages, is that of the mean over all tokens of all ranks;
        mean() of it is that mean. ConfigError where no rank has a token. Collective."""
        self._core.check_one_thread("token_mean")
        return _core.token_mean(self._core.mesh(), sum, count)

    def grad_norm(self) -> float:
        """Global L2 norm of the gradients as they are now, before a step. Collective."""
        self._updates.trained_by("grad_norm")
        return self._on_all(self._core.grad_norm)

    def norm_contribution(self, without: Iterable[torch.Tensor] = ()) -> float:
        """This rank's part of the square of grad_norm(): the parts of all ranks add up to it, replicas counted once,
        without a loss scale. `without`: parameters that do not count, as copies of what another engine counts.
        ValueError, on all ranks, where step() would be one. Collective."""
        self._updates.trained_by("norm_contribution")
        numbers = [self._updates.index[id(param)] for param in without]
        return self._on_all(lambda fault: self._core.norm_contribution(numbers, fault))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """torch.nn.utils.clip_grad_norm_ for gradients that are not in p.grad; between a backward and step(). Returns
        the norm that these had. Gradients with inf or NaN are left to step(), which clips to gradient_clipping (1.0, if
        the configuration does not say) in any case, without another pass. All ranks give the same, else there is a
        ValueError on all of them. Collective."""
        self._updates.trained_by("clip_grad_norm_")
        problem: Exception | None = None
        if norm_type != 2:
            problem = NotImplementedError(f"[engine.clip_grad_norm_] norm_type {norm_type} is not served; use 2.0")
        limit = 0.0 if problem else float(max_norm)
        norm = self._on_all(lambda fault: self._core.clip_grad_norm(limit, fault), problem)
        return torch.tensor(norm, device=self._device)

    def _on_all(self, norm: Callable[[str], float], problem: Exception | None = None) -> float:
        """Calls norm(); announces what keeps this rank from it in the exchange that all make."""
        fault, found = ("", None) if problem else self._look.before_norm()
        problem = problem or found
        try:
            with own_error_first(problem):
                return norm(fault_text(problem) if problem else fault)
        finally:
            self._joining.settle()
