"""What the ranks of one side of a link hold of a tensor. Which part goes from which rank to which is the core's
arithmetic (whole_boxes, wanted_boxes, route: tessera/pipeline/boxes.h).

A box is a range (begin, end) of each dim of the whole tensor, the one that a single rank would have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tessera import _core
from tessera.errors import ConfigError

Box = list[tuple[int, int]]
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The ranks of one side: `batch` of them have other samples, `sequence` share the sequence of a sample, `replicas`
    have the same activations (tensor parallel). Ranks are numbered as on an engine's mesh: replicas are neighbours,
    then come those of a sequence."""

    batch: int = 1
    sequence: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "replicas"):
            if getattr(self, name) < 1:
                raise ConfigError(f"[hybrid] a Layout needs 1 rank at least, got {name}={getattr(self, name)}")

    @classmethod
    def of(cls, engine: Any) -> Layout:
        """That of an engine's mesh."""
        mesh = engine.core.mesh()
        return cls(mesh.batch_size(), mesh.size(_core.Axis.Sp), mesh.size(_core.Axis.Tp))

    @property
    def ranks(self) -> int:
        return self.batch * self.sequence * self.replicas

    @property
    def parts(self) -> int:
        """Ranks that an engine averages gradients over: all but the replicas."""
        return self.batch * self.sequence

    def part(self, rank: int) -> tuple[int, int]:
        """Which batch a rank has, and which part of the sequence."""
        return divmod(rank // self.replicas, self.sequence)

    def holder(self, part: int, taker: int) -> int:
        """The rank that gives `part` (batch * sequence + place in the sequence) to rank `taker` of the other side;
        replicas take turns."""
        return part * self.replicas + taker % self.replicas


@dataclass(frozen=True)
class Dims:
    """Along which dim of every tensor the ranks' batches lie, and along which a sequence is cut. They may be the same
    one, for packed tokens: then each batch has its own stretch of it. Tensors without dims are never cut."""

    batch: int = 0
    sequence: int | None = None

    def check(self, layout: Layout, where: str) -> None:
        if layout.sequence > 1 and self.sequence is None:
            raise ConfigError(f"[hybrid] {where}: {layout.sequence} ranks share a sequence; say sequence_dim, its dim")


def inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where `box` is in a tensor that holds `outer`."""
    return tuple(slice(begin - start, end - start) for (begin, end), (start, _) in zip(box, outer, strict=True))


def sizes_of(box: Box) -> Sizes:
    return tuple(end - begin for begin, end in box)
