"""A link inside one graph, for processes that have a rank of both of its sides."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

import torch
from torch.utils import _pytree

from tessera import _core
from tessera.hybrid._end import text_of
from tessera.hybrid._receiver import Receiver
from tessera.hybrid._sender import Sender

T = TypeVar("T")


def hand_over(
    sender: Sender, receiver: Receiver, outputs: T, sample: Hashable, samples: Sequence[int] | None = None
) -> T:
    """Returns what Receiver.receive() would return of Sender.send(outputs), inside one graph, so that loss.backward()
    goes through both engines: for processes that have a rank on both sides. The ends have no step() then, and must
    exist until the last backward. Collective over both sides, in the backward too."""
    leaves, tree = _pytree.tree_flatten(outputs)
    where = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    source, target = (end._joining.end(f"sample {sample!r}") for end in (sender, receiver))
    tensors = [leaves[place] for place in where]
    rows = None if samples is None else list(samples)
    handed = _core.hand_over(source, target, tensors, text_of(sample), rows)
    for place, tensor in zip(where, handed, strict=True):
        leaves[place] = tensor
    handed_on: T = _pytree.tree_unflatten(leaves, tree)
    return handed_on
