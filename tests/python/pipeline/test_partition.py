"""Which layers the parts of a pipeline have. Schedules: tests/pipeline/, and test_parity_of_stages.py."""

from __future__ import annotations

import pytest
import torch
from stages import in_processes
from torch import nn

from tessera import ConfigError
from tessera.pipeline import LayerSpec, PipelineModule


class Embed(nn.Linear): ...


class Block(nn.Linear): ...


def relu(x: torch.Tensor) -> torch.Tensor:
    return x.relu()


def bounds(method: str, parts: int = 2, first: int = 2) -> list[int]:
    block = LayerSpec(Block, 2, 2)
    layers = [LayerSpec(Embed, first, 2), block, block, relu, block, block, LayerSpec(nn.Linear, 2, 2)]
    return PipelineModule(layers, 2, lambda x, y: x.sum(), partition_method=method, num_chunks=parts // 2).bounds


def methods(rank: int) -> None:
    assert bounds("uniform") in ([0, 3, 7], [0, 4, 7])
    assert bounds("parameters", first=100) == [0, 1, 7]
    _, middle, _ = bounds("type:block")
    assert middle in (3, 4), "two blocks each"
    with pytest.raises(ConfigError, match="finds 1 layers for 2 parts"):
        bounds("type:embed")
    with pytest.raises(ConfigError, match="no partition method 'profile'"):
        bounds("profile")
    with pytest.raises(ConfigError, match="cannot be cut"):
        bounds("uniform", parts=8)


def test_methods_of_partition() -> None:
    in_processes(2, methods)
