"""Losses with gradients of gradients in them, of an engine or a plain model, for tests of several folders."""

from __future__ import annotations

from typing import Any

import torch
from support import batch


def penalty(m: Any, rank: int) -> torch.Tensor:
    """Of the gradient to the input."""
    x, y = batch(rank)
    x.requires_grad_(True)
    loss = m(x, y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.pow(2).sum()


def weight_penalty(m: Any, rank: int) -> torch.Tensor:
    """Of the gradients to parameters."""
    loss = m(*batch(rank))
    params = [p for p in m.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, params, create_graph=True)
    return loss + sum(g.pow(2).sum() for g in grads)


def third_order(m: Any, rank: int) -> torch.Tensor:
    x, y = batch(rank)
    x.requires_grad_(True)
    loss = m(x, y)
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
    return loss + second.pow(2).sum()


def critic(m: Any, rank: int) -> torch.Tensor:
    """WGAN-GP: scores of two batches, a penalty at points between them."""
    real, fake = batch(rank)[0], batch(rank + 10)[0]
    between = (0.3 * real + 0.7 * fake).requires_grad_(True)
    score = m(between)
    (gradient,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True)
    return m(fake).mean() - m(real).mean() + ((gradient.norm(dim=1) - 1) ** 2).mean()


PENALTIES = [penalty, weight_penalty, third_order, critic]
