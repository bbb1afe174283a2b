"""Losses of a sequence that ranks share."""

from __future__ import annotations

import torch

from tessera import _core
from tessera._mesh import OneGroup, core_group
from tessera.sequence._tiled import IGNORED


def sequence_cross_entropy(logits: torch.Tensor, target: torch.Tensor, group: OneGroup | None) -> torch.Tensor:
    """The loss of every token of the sequence, on every rank of `group`: logits [sequence / ranks, batch, vocabulary]
    and target [sequence / ranks, batch] of this rank to losses [sequence, batch]. Collective; the backward is not, each
    rank takes its part of the gradient."""
    return _core.sequence_cross_entropy(logits, target, core_group(group))


def mean_over_sequence(loss: torch.Tensor, labels: torch.Tensor, group: OneGroup | None) -> torch.Tensor:
    """The mean over all tokens of the sequence, on every rank of `group`: `loss` is this rank's mean over its tokens,
    those whose label is not -100 (NaN where it has none). Every rank of the group calls backward() on it: gradients
    that the engine (or any other average over ranks) makes of it are those of one rank with the whole sequence.
    Collective in forward only.
    """
    return _core.mean_over_sequence(loss, labels, core_group(group), IGNORED)
