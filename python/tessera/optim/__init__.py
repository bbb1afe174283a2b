"""Optimizers of the configuration that torch.optim lacks or spells differently. Inside an engine they run on the
core's kernels over the sharded masters; alone they update fp32 parameters in place with the same kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tessera import _core
from tessera.errors import ConfigError


class _KernelOptimizer(torch.optim.Optimizer):
    """step() over the core's kernels, one call per parameter."""

    _rule: _core.Rule
    _states: tuple[str, ...]

    def _options(self, group: dict[str, Any]) -> _core.GroupOptions:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            options = self._options(group)
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, options)
        return loss

    def _update(self, param: torch.Tensor, options: _core.GroupOptions) -> None:
        if param.dtype != torch.float32 or not param.is_contiguous():
            raise ValueError(
                f"[{type(self).__name__}] outside an engine only contiguous fp32 parameters can be updated, got "
                f"{param.dtype} with strides {param.stride()}"
            )
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in self._states:
                state[name] = torch.zeros_like(param)
        state["step"] += 1
        buffers = [state[name].view(-1) for name in self._states]
        gradient = param.grad.contiguous().view(-1)  # type: ignore[union-attr]
        _core.update(self._rule, options, int(state["step"].item()), param.view(-1), gradient, buffers)


class FusedAdam(_KernelOptimizer):
    """Adam and AdamW (`adam_w_mode`, the default) with the arguments DeepSpeed configurations use."""

    _rule = _core.Rule.Adam
    _states = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("[FusedAdam] amsgrad is not supported; use torch.optim.Adam (torch_adam: true)")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
        }
        self.adam_w_mode = adam_w_mode
        _check_rates(type(self).__name__, lr, betas, eps)
        super().__init__(params, defaults)

    def _options(self, group: dict[str, Any]) -> _core.GroupOptions:
        options = _core.GroupOptions()
        options.lr = float(group["lr"])
        options.beta1, options.beta2 = group["betas"]
        options.eps = group["eps"]
        options.weight_decay = group["weight_decay"]
        options.bias_correction = group["bias_correction"]
        options.decoupled = self.adam_w_mode
        return options


class Lion(_KernelOptimizer):
    """Lion (Chen et al., arXiv:2302.06675): the sign of an interpolated momentum, decoupled weight decay."""

    _rule = _core.Rule.Lion
    _states = ("exp_avg",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        _check_rates(type(self).__name__, lr, betas, 0.0)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    def _options(self, group: dict[str, Any]) -> _core.GroupOptions:
        options = _core.GroupOptions()
        options.lr = float(group["lr"])
        options.beta1, options.beta2 = group["betas"]
        options.weight_decay = group["weight_decay"]
        return options


def _check_rates(name: str, lr: float, betas: tuple[float, float], eps: float) -> None:
    wrong = []
    if not lr >= 0:
        wrong.append(f"lr must be >= 0, got {lr}")
    wrong += [f"beta {i} must be in [0, 1), got {beta}" for i, beta in enumerate(betas) if not 0 <= beta < 1]
    if not eps >= 0:
        wrong.append(f"eps must be >= 0, got {eps}")
    if wrong:
        raise ConfigError(f"[{name}] " + "; ".join(wrong))


from tessera.optim._whole import Lamb, Muon  # noqa: E402  (they check their rates here)

__all__ = ["FusedAdam", "Lamb", "Lion", "Muon"]
