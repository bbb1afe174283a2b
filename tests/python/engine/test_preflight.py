"""What is refused of a module before anything is touched; lazy modules are in test_between_steps.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import assert_close, batch, config, full_grads, make, run_ranks
from torch import nn

import tessera


def scripted(kind: str) -> nn.Module:
    model = make()
    if kind == "model":
        return torch.jit.script(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    block = model.blocks[1]
    model.blocks[1] = torch.jit.trace(block, torch.ones(4, 7)) if kind == "traced" else torch.jit.script(block)
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["model", "traced", "block"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_modules_of_torch_jit(stage: int, kind: str) -> None:
    """They train in every stage where parameters are whole, and are refused by name where they are not."""
    world = 1 if stage == 3 else 2
    models = [scripted(kind) for _ in range(world + 1)]  # deepcopy() does not make leaves of their parameters

    def pattern(m: Any, rank: int) -> None:
        m(batch(rank)[0]).square().mean().backward()

    def body(rank: int, group: tessera.Group) -> Any:
        engine = tessera.Engine(models[rank], config(stage), group=group)
        pattern(engine, rank)
        grads = full_grads(engine)
        engine.destroy()
        return grads

    if stage == 3:
        name = r"\(the model\)" if kind == "model" else r"blocks\.1"
        with pytest.raises(NotImplementedError, match=f"{name}.*stage 3 does not serve modules of torch.jit"):
            run_ranks(2, body)
    for rank in range(world):
        pattern(models[-1], rank)
    want = {name: param.grad / world for name, param in models[-1].named_parameters()}
    for grads in run_ranks(world, body):
        assert_close(grads, want)
