"""A link inside one graph, for processes that have a rank of both of its sides."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeVar, overload

import torch
from torch.utils import _pytree

from tessera import _core
from tessera.hybrid._end import VALUES, text_of
from tessera.hybrid._receiver import Receiver
from tessera.hybrid._sender import Sender

T = TypeVar("T")


@overload
def hand_over(
    sender: Sender, receiver: Receiver, outputs: T, sample: Hashable, samples: Sequence[int] | None = None
) -> T: ...
@overload
def hand_over(
    sender: None, receiver: Receiver, outputs: None, sample: Hashable, samples: Sequence[int] | None = None
) -> Any: ...
def hand_over(
    sender: Sender | None, receiver: Receiver, outputs: object, sample: Hashable, samples: Sequence[int] | None = None
) -> object:
    """Returns what Receiver.receive() would return of Sender.send(outputs), inside one graph, so that loss.backward()
    goes through both engines: for processes that have a rank on both sides. A process of the target alone passes None
    for `sender` and `outputs`, one of the source alone has Sender.send() and Sender.backward(). The ends have no step()
    then, and must exist until the last backward. Collective over both sides, in the backward too."""
    target = receiver._joining.end(f"sample {sample!r}")
    if sender is None:
        tensors, note = _core.take_over(target, text_of(sample))
        return VALUES.join(note, tensors)
    source = sender._joining.end(f"sample {sample!r}")
    _, note = VALUES.split(outputs)  # for processes of the target alone
    leaves, tree = _pytree.tree_flatten(outputs)
    where = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    rows = None if samples is None else list(samples)
    handed = _core.hand_over(source, target, [leaves[place] for place in where], text_of(sample), rows, note)
    for place, tensor in zip(where, handed, strict=True):
        leaves[place] = tensor
    return _pytree.tree_unflatten(leaves, tree)
