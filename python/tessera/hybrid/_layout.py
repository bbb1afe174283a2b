"""What the ranks of one side of a link hold of a tensor, and which part goes from which rank to which: pure arithmetic.

A box is a range (begin, end) of each dim of the whole tensor, the one that a single rank would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tessera import _core
from tessera.errors import ConfigError

Box = tuple[tuple[int, int], ...]
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


def whole_boxes(layout: Layout, dims: Dims, shapes: Sequence[Sizes], where: str) -> tuple[Sizes, list[Box]]:
    """The sizes of the whole tensor and what each part of `layout` holds of it; `shapes`: what each part has. Sizes
    need not be equal, but must fit together."""
    first = shapes[0]
    if not first:
        return (), [()] * len(shapes)
    cut = _cut_dims(layout, dims, first, where)
    for part, shape in enumerate(shapes):
        if len(shape) != len(first) or any(shape[d] != first[d] for d in range(len(first)) if d not in cut):
            raise ConfigError(
                f"[hybrid] {where}: the parts of ranks {0} and {part * layout.replicas} do not fit together: "
                f"{list(first)} and {list(shape)}"
            )
    boxes = [[(0, size) for size in first] for _ in shapes]
    whole = list(first)
    for dim, places in cut.items():
        begins = _begins([shape[dim] for shape in shapes], places, layout, dim, where)
        for box, shape, begin in zip(boxes, shapes, begins, strict=True):
            box[dim] = (begin, begin + shape[dim])
        whole[dim] = max(box[dim][1] for box in boxes)
    return tuple(whole), [tuple(box) for box in boxes]


def _cut_dims(layout: Layout, dims: Dims, shape: Sizes, where: str) -> dict[int, str]:
    """Dim -> what lies along it: "batch", "sequence" or "both"."""
    cut: dict[int, str] = {}
    for name, dim, ranks in (("batch", dims.batch, layout.batch), ("sequence", dims.sequence, layout.sequence)):
        if ranks == 1 or dim is None:
            continue
        if not -len(shape) <= dim < len(shape):
            raise ConfigError(f"[hybrid] {where}: {name}_dim is {dim}, but a tensor has the sizes {list(shape)}")
        cut[dim % len(shape)] = "both" if dim % len(shape) in cut else name
    return cut


def _begins(sizes: list[int], places: str, layout: Layout, dim: int, where: str) -> list[int]:
    """Where along a dim each part begins."""
    if places == "both":
        return [0, *accumulate(sizes)][:-1]
    rows = [sizes[i : i + layout.sequence] for i in range(0, len(sizes), layout.sequence)]
    if places == "batch":
        if any(len(set(row)) > 1 for row in rows):
            raise ConfigError(f"[hybrid] {where}: ranks that share a sequence have {sizes} rows along dim {dim}")
        starts = [0, *accumulate(row[0] for row in rows)][:-1]
        return [start for start in starts for _ in range(layout.sequence)]
    if any(row != rows[0] for row in rows):
        raise ConfigError(f"[hybrid] {where}: batches have sequences of other lengths along dim {dim}: {rows}")
    return [0, *accumulate(rows[0])][:-1] * layout.batch


def wanted_boxes(layout: Layout, dims: Dims, whole: Sizes, samples: Sequence[int] | None, where: str) -> list[Box]:
    """What each part of `layout` gets of a tensor: nearly equal numbers of samples, and of each nearly equal parts of
    the sequence, the larger ones first. `samples`: how many rows of the batch dim each sample has; None: one."""
    if not whole:
        return [()] * layout.parts
    cut = _cut_dims(layout, dims, whole, where)
    boxes = []
    for part in range(layout.parts):
        batch, place = divmod(part, layout.sequence)
        box = [(0, size) for size in whole]
        for dim, places in cut.items():
            rows = (0, whole[dim])
            if places != "sequence":
                rows = _rows_of(batch, layout.batch, whole[dim], samples, where)
            box[dim] = rows if places == "batch" else _nth(rows, layout.sequence, place)
        boxes.append(tuple(box))
    return boxes


def _rows_of(number: int, ranks: int, rows: int, samples: Sequence[int] | None, where: str) -> tuple[int, int]:
    if samples is None:
        return _nth((0, rows), ranks, number)
    if sum(samples) != rows:
        raise ConfigError(f"[hybrid] {where}: samples of {list(samples)} rows are {sum(samples)}, a tensor has {rows}")
    begin, end = _nth((0, len(samples)), ranks, number)
    return sum(samples[:begin]), sum(samples[:end])


def _nth(rows: tuple[int, int], parts: int, number: int) -> tuple[int, int]:
    size, larger = divmod(rows[1] - rows[0], parts)
    begin = rows[0] + number * size + min(number, larger)
    return begin, begin + size + (number < larger)


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes of a tensor have in common, None for nothing."""
    both = tuple((max(m, n), min(o, p)) for (m, o), (n, p) in zip(a, b, strict=True))
    return both if all(begin < end for begin, end in both) else None


def inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where `box` is in a tensor that holds `outer`."""
    return tuple(slice(begin - start, end - start) for (begin, end), (start, _) in zip(box, outer, strict=True))


def route(held: Sequence[Box], part: int, wanted: Box) -> Box | None:
    """What `part` of the giving side sends of what a rank wants. Parts never overlap, so a gradient that goes the same
    way back is never counted twice. A tensor without dims comes from part 0."""
    if not wanted:
        return () if part == 0 else None
    return overlap(held[part], wanted)


def sizes_of(box: Box) -> Sizes:
    return tuple(end - begin for begin, end in box)
