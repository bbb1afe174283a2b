"""The outputs' end of a link."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tessera import _core
from tessera.errors import UsageError
from tessera.hybrid._end import VALUES, End, samples_of, wholes
from tessera.hybrid._messages import Header, Meta, join, text_of

if TYPE_CHECKING:
    from tessera.hybrid._link import Link


class Sender(End):
    """The outputs' end of a link, on one rank. Link.sender() makes it."""

    def __init__(self, link: Link, store: Any, rank: int, engine: Any) -> None:
        super().__init__(link, "source", store, rank, engine)
        self._sent: dict[Hashable, tuple[int, list[torch.Tensor]]] = {}

    def send(self, outputs: Any, sample: Hashable, samples: Sequence[int] | None = None) -> None:
        """Hands outputs over: tensors in any nesting of tuples, lists and dicts; sizes may change from call to call.
        Tensors with a graph arrive as leaves that require gradients. `sample`: the micro-batch, by a name or number of
        your own, which receive() must ask for. `samples`: how many rows of batch_dim each sample of this rank's batch
        has (all parts of its sequence together), where batches are dealt out to another number of ranks and a sample
        is more than one row. Waits for nobody, but the first time for the other ranks to come."""
        if sample in self._sent:
            raise UsageError(f"{self._me}: sample {sample!r} is on its way already; call backward() for it first")
        tensors, note = VALUES.split(outputs)
        trained = [t for t in tensors if t.requires_grad]
        number = self._announce(sample, tensors, note, samples)
        if trained:
            self._sent[sample] = (number, trained)

    def _announce(self, sample: Hashable, tensors: list[torch.Tensor], note: str, samples: Any) -> int:
        number, self._number, self._since = self._number, self._number + 1, self._since + 1
        metas = tuple(Meta(t.dtype, tuple(t.shape), t.requires_grad) for t in tensors)
        header = Header(text_of(sample), metas, note, None if samples is None else tuple(samples))
        kind = f"out/{number}"
        wired = self._post.wired()
        self._post.announce(kind, header, tensors, self.link.source.parts - 1 if wired else 0)
        if wired:
            what = f"its part of sample {sample!r}"
            headers = self._post.read(kind, what, lambda _: None, side="source")
            whole_of = wholes(self.link, headers, self._name)
            together = samples_of(self.link, headers)
            wanted = [
                _core.wanted_boxes(self.link.target, self.link.dims, whole, together, self._name)
                for whole, _ in whole_of
            ]
            replicas = self.link.target.replicas
            self._post.push(
                kind, metas, tensors, [held for _, held in whole_of], lambda rank: [w[rank // replicas] for w in wanted]
            )
            self._post.taken(kind, side="source")
        return number

    def backward(self, sample: Hashable) -> None:
        """Waits for the gradient of a sample and runs the backward of its outputs with it. In any order; once for each
        sample that was sent with a graph."""
        if sample not in self._sent:
            raise UsageError(
                f"{self._me}: there is no graph of sample {sample!r} (it was not sent, sent under no_grad, or its "
                f"backward has run); waiting for gradients are {list(self._sent)}"
            )
        number, outputs = self._sent.pop(sample)
        grads = self._gradients(number, sample, [output.device for output in outputs])
        pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
        if not pairs:
            return
        roots = [self._engine.scale(output) if self._engine is not None else output for output, _ in pairs]
        try:
            torch.autograd.backward(roots, [grad for _, grad in pairs])
        except RuntimeError as error:
            if "through the graph a second time" not in str(error):
                raise
            raise UsageError(
                f"{self._me}: the graph of sample {sample!r} was freed before its gradient came: another backward "
                "went through it; call that with retain_graph=True"
            ) from error

    def _gradients(self, number: int, sample: Hashable, devices: Sequence[torch.device]) -> list[torch.Tensor | None]:
        """Of the outputs that have a graph, for an engine that averages over the source's ranks."""
        what = f"the gradient of sample {sample!r}"
        kind = f"back/{number}"
        headers = self._post.read(kind, what, lambda peer: self._still_in_step(what, 0, peer))
        held = [[header.box[i] for header in headers] for i in range(len(devices))]
        wanted = [headers[0].held[i][self._part] for i in range(len(devices))]
        message = self._post.open(kind, headers, held, wanted, what)
        factor = self.link.source.parts / self.link.target.parts
        grads = []
        for i, device in enumerate(devices):
            grad = join(message, i, held[i], wanted[i], device)
            grads.append(grad if grad is None or factor == 1 else grad * factor)
        self._post.taken(kind)
        return grads

    def _outstanding(self) -> list[Hashable]:
        return list(self._sent)
