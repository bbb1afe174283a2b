"""Random draws: alike where ranks hold the same, on their own where each holds a slice. See Note [Random draws]."""

from __future__ import annotations

import pytest
import torch
from tessera.parallel._draws import Draws, has_draws
from tiny_models import LLAMA, MODELS, of
from torch import nn
from torch.utils.checkpoint import checkpoint

CPU = torch.device("cpu")


def run(rank: int, draws: Draws, seed: int = 7) -> tuple[list[float], list[float]]:
    """What is drawn outside and inside of two regions that follow one another."""
    torch.manual_seed(seed)
    outside, inside = [torch.rand(()).item()], []
    for _ in range(2):
        draws.enter(rank, CPU)
        draws.enter(rank, CPU)  # key after query
        inside += torch.rand(2 + rank).tolist()
        draws.leave(CPU)
        draws.leave(CPU)
    return [*outside, torch.rand(()).item()], inside


def test_regions_draw_on_their_own_and_leave_no_trace() -> None:
    outside, inside = zip(*(run(rank, Draws()) for rank in range(3)), strict=True)
    assert outside[0] == outside[1] == outside[2]
    assert len({value for part in inside for value in part}) == sum(map(len, inside))
    assert run(1, Draws()) == (outside[1], inside[1])
    assert run(1, Draws(), seed=8)[1] != inside[1]


@pytest.mark.parametrize("early", [True, False])
def test_a_replay_draws_the_same(early: bool) -> None:
    """Also one that stops inside a region, as non-reentrant checkpointing does."""
    draws = Draws()
    masks = []

    def block(x: torch.Tensor) -> torch.Tensor:
        draws.enter(1, CPU)
        mask = torch.rand(3)
        masks.append(mask)
        y = (x * mask).sin()
        if not early:
            draws.leave(CPU)
            y = y.exp()
        else:
            y = y + 1  # saves nothing: the replay ends before
            draws.leave(CPU)
        return y

    x = torch.ones(3, requires_grad=True)
    torch.manual_seed(3)
    checkpoint(lambda v: checkpoint(block, v, use_reentrant=False), x, use_reentrant=False).sum().backward()
    assert all(mask.equal(masks[0]) for mask in masks) and len(masks) > 1
    draws.enter(1, CPU)
    assert not torch.rand(3).equal(masks[0])


def test_models_that_drop_something_are_known() -> None:
    assert not has_draws(MODELS["llama"][0]())
    assert has_draws(of("Llama", LLAMA, attention_dropout=0.1)())
    assert has_draws(nn.Sequential(nn.Dropout(0.1))) and not has_draws(nn.Sequential(nn.Dropout(0.0)))
