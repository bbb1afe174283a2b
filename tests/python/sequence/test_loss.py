"""Losses of a shared sequence are those of the sequence on one rank."""

from __future__ import annotations

import pytest
import torch
from support import run_ranks
from tessera.sequence import mean_over_sequence, sequence_cross_entropy
from torch.nn import functional as F

import tessera

WORLD, LENGTH, VOCABULARY = 4, 8, 5


def test_every_rank_has_the_loss_of_every_token() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(LENGTH, 2, VOCABULARY, generator=generator, requires_grad=True)
    target = torch.randint(0, VOCABULARY, (LENGTH, 2), generator=generator)
    incoming = torch.randn(LENGTH, 2, generator=generator)
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(LENGTH, 2)
    expected.backward(incoming)

    def body(rank: int, group: tessera.Group) -> None:
        mine = logits.detach().chunk(WORLD)[rank].clone().requires_grad_()
        losses = sequence_cross_entropy(mine, target.chunk(WORLD)[rank], group)
        torch.testing.assert_close(losses, expected.detach())
        losses.backward(incoming)
        assert logits.grad is not None
        torch.testing.assert_close(mine.grad, logits.grad.chunk(WORLD)[rank])

    run_ranks(WORLD, body)


@pytest.mark.parametrize("counting", [[8, 3, 5, 1], [2, 0, 8, 0], [0, 0, 0, 0]])
def test_the_mean_counts_tokens(counting: list[int]) -> None:
    """Also where a rank has no token that counts, and gradients averaged over ranks are those of the whole."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(3, VOCABULARY, generator=generator)
    x = torch.randn(WORLD, 8, 3, generator=generator)
    labels = torch.randint(0, VOCABULARY, (WORLD, 8), generator=generator)
    for rank, count in enumerate(counting):
        labels[rank, count:] = -100
    whole = weight.clone().requires_grad_()
    total = F.cross_entropy((x @ whole).flatten(0, 1), labels.flatten(), reduction="sum") / max(sum(counting), 1)
    total.backward()

    def body(rank: int, group: tessera.Group) -> torch.Tensor:
        mine = weight.clone().requires_grad_()
        loss = mean_over_sequence(F.cross_entropy(x[rank] @ mine, labels[rank]), labels[rank], group)
        torch.testing.assert_close(loss, total.detach())
        (2 * loss).backward()
        assert mine.grad is not None
        return mine.grad / 2

    torch.testing.assert_close(sum(run_ranks(WORLD, body)) / WORLD, whole.grad)


def test_wrong_sizes() -> None:
    with pytest.raises(ValueError, match=r"logits have the sizes \[2, 3\], target \[2\]"):
        sequence_cross_entropy(torch.ones(2, 3), torch.ones(2), tessera.single_group())
