"""Random generators that are put aside."""

from __future__ import annotations

import random

import torch
from tessera._random import aside, put_random_states, random_states


def test_what_is_drawn_aside_leaves_no_trace() -> None:
    torch.manual_seed(1)
    random.seed(1)
    begin = torch.get_rng_state()
    states = random_states()
    first = torch.rand(3), random.random()
    with aside(begin):
        assert torch.equal(torch.rand(3), first[0])
        random.random()
    second = torch.rand(3), random.random()
    put_random_states(states)
    assert torch.equal(torch.rand(3), first[0]) and random.random() == first[1]
    assert torch.equal(torch.rand(3), second[0]) and random.random() == second[1]
