"""The inputs' end of a link."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch.utils import _pytree

from tessera import _core
from tessera.hybrid._end import VALUES, End, text_of
from tessera.hybrid._joining import Store
from tessera.hybrid._layout import HasCore, Terms


class Receiver(End):
    """The inputs' end of a link, on one rank. Link.receiver() makes it."""

    def __init__(self, link: Terms, store: Store, rank: int, engine: HasCore | None) -> None:
        super().__init__(link, "target", _core.LinkReceiver, store, rank, engine)

    def receive(self, sample: Hashable) -> Any:
        """Waits for the next message and returns this rank's part of it, in the nesting in which it was sent. It must
        be of `sample`. Tensors that were sent with a graph are leaves that require gradients."""
        tensors, note = self._joining.call(f"sample {sample!r}", "receive", text_of(sample))
        return VALUES.join(note, tensors)

    def give_back(self, sample: Hashable, gradients: object = None) -> None:
        """Sends the gradients of what receive(sample) returned: those in .grad, or `gradients`, in the nesting of
        receive() or a list with one for each tensor that requires some; None for a gradient that is zero. After the
        backward of the sample; waits for nobody. The engine's loss scale is divided out."""
        given = None if gradients is None else _pytree.tree_leaves(gradients, is_leaf=lambda leaf: leaf is None)
        self._joining.call(f"sample {sample!r}", "give_back", text_of(sample), given)
