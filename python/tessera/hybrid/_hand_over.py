"""A link inside one graph, for processes that have a rank of both of its sides."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from tessera.hybrid._receiver import Receiver
from tessera.hybrid._sender import Sender


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sender: Sender, receiver: Receiver, sample: Any, samples: Any, *tensors: torch.Tensor) -> Any:
        ctx.ends, ctx.sample = (sender, receiver), sample
        ctx.number = sender._announce(sample, list(tensors), "", samples)
        ctx.devices = [t.device for t in tensors if t.requires_grad]
        found, ctx.received = receiver._take(receiver._headers(sample), sample)
        ctx.set_materialize_grads(False)
        outputs = [tensor.detach() for tensor in found]
        ctx.mark_non_differentiable(*(o for o, t in zip(outputs, tensors, strict=True) if not t.requires_grad))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sender, receiver = ctx.ends
        needed = ctx.needs_input_grad[4:]
        given = [grad for grad, need in zip(grads, needed, strict=True) if need]
        receiver._return(ctx.sample, ctx.received, given)
        back = iter(sender._gradients(ctx.number, ctx.sample, ctx.devices))
        return None, None, None, None, *(next(back) if need else None for need in needed)


def hand_over(
    sender: Sender, receiver: Receiver, outputs: Any, sample: Hashable, samples: Sequence[int] | None = None
) -> Any:
    """For processes that have a rank of both sides: what Receiver.receive() would return of Sender.send(outputs),
    inside one graph, so that loss.backward() goes through both engines. The ends have no step() then. Collective over
    both sides, in the backward too."""
    sender.hands_over = receiver.hands_over = True
    leaves, tree = _pytree.tree_flatten(outputs)
    where = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = _HandOver.apply(sender, receiver, sample, samples, *(leaves[place] for place in where))
    for place, tensor in zip(where, tensors, strict=True):
        leaves[place] = tensor
    return _pytree.tree_unflatten(leaves, tree)
