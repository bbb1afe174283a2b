"""AdamW, clipping and rounding in plain PyTorch, written out so that the bits are defined. Tessera has the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class AdamW:
    """torch.optim.AdamW(foreach=False, fused=False) with a square root that is correctly rounded. (torch.sqrt is off by
    the last bit now and then where it calls MKL.)"""

    def __init__(
        self, params: list[Tensor], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        self.params, self.betas, self.eps, self.weight_decay = params, betas, eps, weight_decay
        self.param_groups: list[dict[str, Any]] = [{"lr": lr}]
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        lr, (beta1, beta2) = self.param_groups[0]["lr"], self.betas
        step_size = lr / (1 - beta1**self.steps)
        correction = (1 - beta2**self.steps) ** 0.5
        for param, (first, second) in zip(self.params, self.moments, strict=True):
            grad = param.grad
            assert grad is not None
            param.mul_(1 - lr * self.weight_decay)
            first.lerp_(grad, 1 - beta1)
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            root = second.double().sqrt_().float()
            param.addcdiv_(first, root.div_(correction).add_(self.eps), value=-step_size)

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


@torch.no_grad()
def clip_by_norm(params: list[Tensor], limit: float) -> None:
    """clip_grad_norm_ with squares that are added in double: their order does not show."""
    grads = [param.grad for param in params if param.grad is not None]
    norm = sum(grad.double().square_().sum().item() for grad in grads) ** 0.5
    coefficient = min(1.0, limit / (norm + 1e-6))
    for grad in grads:
        grad.mul_(coefficient)


def round_ties_up(half: Tensor, full: Tensor) -> None:
    """Writes fp32 `full` to bf16 `half`, the nearest value and of two equally near ones the larger in magnitude."""
    bits = full.view(torch.int32) + 0x8000
    half.view(torch.int16).copy_(bits >> 16)
