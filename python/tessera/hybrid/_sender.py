"""The outputs' end of a link."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from tessera import _core
from tessera.hybrid._end import VALUES, End, text_of
from tessera.hybrid._joining import Store
from tessera.hybrid._layout import HasCore, Terms


class Sender(End):
    """The outputs' end of a link, on one rank. Link.sender() makes it."""

    def __init__(self, link: Terms, store: Store, rank: int, engine: HasCore | None) -> None:
        super().__init__(link, "source", _core.LinkSender, store, rank, engine)

    def send(self, outputs: object, sample: Hashable, samples: Sequence[int] | None = None) -> None:
        """Sends outputs: tensors in any nesting of tuples, lists and dicts; sizes may change from call to call,
        and the tensors after the call. Tensors with a graph arrive as leaves that require gradients. `sample`: the
        micro-batch, by a number or text of your own or a tuple of them, which receive() must ask for. `samples`: how
        many rows of batch_dim each sample of this rank's batch has (all parts of its sequence together), where batches
        are dealt out to another number of ranks and a sample is more than one row. Waits the first time for all ranks
        to come; then for those of the source that have other parts, to send the same sample; for the target only with
        outputs without any graph, until it is 8 of them behind at most."""
        tensors, note = VALUES.split(outputs)
        rows = None if samples is None else list(samples)
        self._joining.call(f"its part of sample {sample!r}", "send", tensors, text_of(sample), rows, note)

    def backward(self, sample: Hashable) -> None:
        """Waits for the gradient of a sample and runs the backward of its outputs with it. In any order; once for each
        sample that was sent with a graph."""
        roots, gradients = self._joining.call(f"the gradient of sample {sample!r}", "gradients", text_of(sample))
        if not roots:
            return
        try:
            torch.autograd.backward(roots, gradients)
        except RuntimeError as error:
            self._joining.call(f"sample {sample!r}", "check_not_freed", text_of(sample), str(error))
            raise
