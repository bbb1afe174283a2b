"""Programs of several engines: a link hands outputs of one to another, of other ranks, and gradients back; actor groups
place the ranks on a Ray cluster. See docs/hybrid.md."""

from __future__ import annotations

from tessera.hybrid._actors import ActorError, ActorGroup, Pending, Place, wait
from tessera.hybrid._hand_over import hand_over
from tessera.hybrid._layout import Layout
from tessera.hybrid._link import Link
from tessera.hybrid._program import Program
from tessera.hybrid._receiver import Receiver
from tessera.hybrid._sender import Sender

__all__ = [
    "ActorError",
    "ActorGroup",
    "Layout",
    "Link",
    "Pending",
    "Place",
    "Program",
    "Receiver",
    "Sender",
    "hand_over",
    "wait",
]
