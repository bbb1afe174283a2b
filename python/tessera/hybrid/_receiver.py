"""The inputs' end of a link."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from tessera import _core
from tessera.errors import ConfigError, UsageError
from tessera.hybrid._end import VALUES, End, samples_of, wholes
from tessera.hybrid._layout import Box
from tessera.hybrid._messages import Header, Meta, join, text_of

if TYPE_CHECKING:
    from tessera.hybrid._link import Link


@dataclass
class _Received:
    number: int
    leaves: list[torch.Tensor]  # that require gradients
    metas: list[Meta]
    held: tuple[tuple[Box, ...], ...]  # by the source's parts
    wanted: tuple[tuple[Box, ...], ...]  # by the target's


class Receiver(End):
    """The inputs' end of a link, on one rank. Link.receiver() makes it."""

    def __init__(self, link: Link, store: Any, rank: int, engine: Any) -> None:
        super().__init__(link, "target", store, rank, engine)
        self._open: dict[Hashable, _Received] = {}
        self.device = torch.device("cpu") if engine is None else engine.device

    def receive(self, sample: Hashable) -> Any:
        """Waits for the next message and returns this rank's part of it, in the nesting in which it was sent. It must
        be of `sample`. Tensors that were sent with a graph are leaves that require gradients."""
        headers = self._headers(sample)
        tensors, received = self._take(headers, sample)
        if received.leaves:
            self._open[sample] = received
        return VALUES.join(headers[0].outputs, tensors)

    def _headers(self, sample: Hashable) -> list[Header]:
        if sample in self._open:
            raise UsageError(f"{self._me}: sample {sample!r} was received already; call give_back() for it first")
        what = f"sample {sample!r}"
        need = self._since + 1
        headers = self._post.read(f"out/{self._number}", what, lambda _: self._still_in_step(what, need))
        for part, header in enumerate(headers):
            if header.sample != text_of(sample):
                peer = ("source", self.link.source.holder(part, self.rank))
                raise UsageError(
                    f"{self._me} asks for sample {sample!r}, but the next message of {self._mailbox.name(peer)} is of "
                    f"sample {header.sample}"
                )
            kinds = [(meta.dtype, meta.trained) for meta in header.metas]
            if kinds != [(meta.dtype, meta.trained) for meta in headers[0].metas]:
                raise ConfigError(f"{self._me}: ranks of {self.link.sides[0]} sent other tensors of sample {sample!r}")
        return headers

    def _take(self, headers: list[Header], sample: Hashable) -> tuple[list[torch.Tensor], _Received]:
        link, kind = self.link, f"out/{self._number}"
        whole_of = wholes(link, headers, self._name)
        samples = samples_of(link, headers)
        held = tuple(tuple(boxes) for _, boxes in whole_of)
        wanted = tuple(
            tuple(_core.wanted_boxes(link.target, link.dims, whole, samples, self._name)) for whole, _ in whole_of
        )
        mine = [boxes[self._part] for boxes in wanted]
        self._post.wired()
        message = self._post.open(kind, headers, held, mine, f"sample {sample!r}")
        metas = headers[0].metas
        tensors: list[torch.Tensor] = []
        for i, meta in enumerate(metas):
            tensor = join(message, i, held[i], mine[i], self.device)
            assert tensor is not None
            tensors.append(tensor.requires_grad_() if meta.trained else tensor)
        self._post.taken(kind)
        trained = [i for i, meta in enumerate(metas) if meta.trained]
        received = _Received(
            self._number,
            [tensors[i] for i in trained],
            [metas[i] for i in trained],
            tuple(held[i] for i in trained),
            tuple(wanted[i] for i in trained),
        )
        self._number, self._since = self._number + 1, self._since + 1
        return tensors, received

    def give_back(self, sample: Hashable, gradients: Any = None) -> None:
        """Sends the gradients of what receive(sample) returned: those in .grad, or `gradients`, in the nesting of
        receive() or a list of those of the tensors that require some; None for one that is zero. After the backward of
        the sample; waits for nobody. Of a loss scale of the engine they are freed."""
        received = self._open.get(sample)
        if received is None:
            raise UsageError(
                f"{self._me}: sample {sample!r} has no gradient to give back (it was not received, came without a "
                f"graph, or its gradient has gone); those that have: {list(self._open)}"
            )
        grads = [leaf.grad for leaf in received.leaves] if gradients is None else self._given(received, gradients)
        if all(grad is None for grad in grads):
            raise UsageError(
                f"{self._me}: no gradient has reached sample {sample!r}; call give_back() after the backward of its "
                "loss"
            )
        scale = 1.0
        if self._engine is not None and self._engine.core.scaler().needed():
            scale = self._engine.core.gradient_loss_scale()
        self._return(sample, received, [grad if grad is None or scale == 1 else grad / scale for grad in grads])
        del self._open[sample]

    def _given(self, received: _Received, gradients: Any) -> list[torch.Tensor | None]:
        given = _pytree.tree_leaves(gradients, is_leaf=lambda leaf: leaf is None)
        if len(given) != len(received.leaves):
            raise ConfigError(
                f"{self._me}: give_back() got {len(given)} gradients for {len(received.leaves)} tensors that require "
                "some"
            )
        for grad, leaf in zip(given, received.leaves, strict=True):
            if grad is not None and grad.shape != leaf.shape:
                raise ConfigError(
                    f"{self._me}: a gradient has the sizes {list(grad.shape)}, its tensor {list(leaf.shape)}"
                )
        return [None if g is None else g.to(leaf.dtype) for g, leaf in zip(given, received.leaves, strict=True)]

    def _return(self, sample: Hashable, received: _Received, grads: Sequence[torch.Tensor | None]) -> None:
        metas = tuple(
            Meta(meta.dtype, tuple(leaf.shape), False, grad is not None)
            for meta, leaf, grad in zip(received.metas, received.leaves, grads, strict=True)
        )
        present = [grad for grad in grads if grad is not None]
        mine = tuple(boxes[self._part] for boxes in received.wanted)
        kind = f"back/{received.number}"
        self._post.announce(kind, Header(text_of(sample), metas, held=received.held, box=mine), present)
        if self._post.wired():
            replicas = self.link.source.replicas
            self._post.push(
                kind, metas, present, received.wanted, lambda rank: [held[rank // replicas] for held in received.held]
            )

    def _outstanding(self) -> list[Hashable]:
        return list(self._open)
