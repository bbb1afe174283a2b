"""The model of device_grid.py."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, an embedding, a transposed parameter, one of one element, one without a gradient."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.table = nn.Embedding(19, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.transposed = nn.Parameter((torch.randn(width, 7) / width**0.5).t().contiguous().t())
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return (((x @ self.transposed) * self.gain).float() - y).square().mean()
