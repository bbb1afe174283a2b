"""A differentiable hand-over between two engines: outputs go forward, gradients come back. See docs/hybrid.md."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.hybrid._joining import Store
from tessera.hybrid._layout import HasCore, Terms
from tessera.hybrid._receiver import Receiver
from tessera.hybrid._sender import Sender


@dataclass(frozen=True)
class Link(Terms):
    """What both sides of a hand-over must agree on; plain data, which may travel to other processes.

    `name`: unique among the links of a store. `source`, `target`: the ranks of both sides. `batch_dim`: the dim of
    every tensor along which batches of ranks lie; `sequence_dim`: the one that ranks of a sequence cut, which for
    packed tokens may be the same. `sides`: names of the two in errors. `timeout`: seconds that a rank waits for
    another one; None: those of the process group where it waits, 600 without one. `transport`: "auto" (memory between
    processes of one host, a Gloo process group between hosts), "group" (the process group everywhere) or "ray" (Ray's
    object store everywhere; for actor groups).
    """

    def sender(self, store: Store, rank: int, engine: HasCore | None = None) -> Sender:
        """This process as rank `rank` of the source. `store`: a torch.distributed store that all ranks of both sides
        reach, through a client of this rank's own. `engine`: the engine whose outputs are sent; its mesh is checked,
        and its loss scale holds in backward(). Waits for nobody."""
        return Sender(self, store, rank, engine)

    def receiver(self, store: Store, rank: int, engine: HasCore | None = None) -> Receiver:
        """This process as rank `rank` of the target, as sender() is of the source."""
        return Receiver(self, store, rank, engine)
