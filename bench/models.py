"""Models of the benchmarks. Those named Many... cost next to nothing to compute: what is left is the engine."""

from __future__ import annotations

import math
from typing import Any

import torch
from gpt import Gpt, GptOptions
from torch import nn

PER_BLOCK = 10
GPT_SIZES = {
    "tiny": GptOptions(layers=1, width=64, heads=1, context=64),
    "1M": GptOptions(layers=4, width=128, heads=4, context=64),  # to try the scripts
    "3M": GptOptions(layers=4, width=256, heads=4, context=128),
    "10M": GptOptions(),
    "30M": GptOptions(layers=6, width=640, heads=10),
    "125M": GptOptions(layers=16, width=800, heads=10),
    # The models of DeepSpeed's own tables of low precision: as many parameters, sequences of 512.
    "254M": GptOptions(layers=12, width=1024, heads=16, context=512, vocabulary=50257),
    "7B": GptOptions(layers=32, width=4096, heads=32, context=512, vocabulary=50257),
    "350M": GptOptions(layers=28, width=1024, heads=16),
}


def sizes(count: int, elements: int) -> int:
    return max(1, elements // count)


class ManyTensors(nn.Module):
    """`count` parameters of equal size, `elements` together."""

    def __init__(self, count: int, elements: int) -> None:
        super().__init__()
        size = sizes(count, elements)
        self.blocks = nn.ModuleList(
            nn.ParameterList(torch.randn(size) for _ in range(min(PER_BLOCK, count - start)))
            for start in range(0, count, PER_BLOCK)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for block in self.blocks:
            for param in block:
                total = total + param[:1].sum().to(x.dtype) * x
        return total.float()


class Layer(nn.Module):
    def __init__(self, size: int, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size).mul_(scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight[:1].sum().to(x.dtype) * x


class ManyLayers(nn.Module):
    """As ManyTensors, with a module for every parameter and blocks of `per_block`, so that engines can partition."""

    def __init__(self, count: int, elements: int, per_block: int = PER_BLOCK) -> None:
        super().__init__()
        size, scale = sizes(count, elements), 1 / math.sqrt(count)  # the product over all layers stays near 1
        self.blocks = nn.ModuleList(
            nn.Sequential(*(Layer(size, scale) for _ in range(min(per_block, count - start))))
            for start in range(0, count, per_block)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float()


class NarrowBlocks(nn.Module):
    """`count` blocks of linear layers of one element."""

    LAYERS = 5

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(1, 1) for _ in range(self.LAYERS))) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().sum()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules that FSDP2 shards one by one."""
    found: Any = getattr(model, "blocks", [])
    return [b for b in found if not isinstance(b, nn.ParameterList)]


def gpt(size: str) -> Gpt:
    return Gpt(GPT_SIZES[size])


def elements_of(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def parameters_of(size: str) -> int:
    """Of a GPT, without building it."""
    with torch.device("meta"):
        return elements_of(gpt(size))
