"""The terms that the ranks of a link agree on: who holds what of a tensor, and how it travels. Which part goes from
which rank to which is the core's arithmetic (tessera/pipeline/boxes.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tessera import _core
from tessera.errors import ConfigError


class HasCore(Protocol):
    """An engine."""

    @property
    def core(self) -> _core.Engine: ...


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
    def of(cls, engine: HasCore) -> Layout:
        """The layout of an engine's mesh."""
        mesh = engine.core.mesh()
        return cls(mesh.batch_size(), mesh.size(_core.Axis.Sp), mesh.size(_core.Axis.Tp))

    @property
    def ranks(self) -> int:
        """How many ranks the side has."""
        return self.batch * self.sequence * self.replicas

    @property
    def parts(self) -> int:
        """Ranks that an engine averages gradients over: all but the replicas."""
        return self.batch * self.sequence


@dataclass(frozen=True)
class Dims:
    """The dim of every tensor along which the ranks' batches lie, and the one along which a sequence is cut. They may
    be one dim, for packed tokens: then each batch has its own stretch of it. Tensors without dims are never cut."""

    batch: int = 0
    sequence: int | None = None


SIDES = ("source", "target")
_ONE_RANK = Layout()


@dataclass(frozen=True)
class Terms:
    """The fields of a Link, in which they are explained."""

    name: str
    source: Layout = _ONE_RANK
    target: Layout = _ONE_RANK
    batch_dim: int = 0
    sequence_dim: int | None = None
    sides: tuple[str, str] = SIDES
    timeout: float | None = None
    transport: str = "auto"

    def __post_init__(self) -> None:
        if self.transport not in ("auto", "group", "ray"):
            raise ConfigError(f"[hybrid] transport must be 'auto', 'group' or 'ray', got {self.transport!r}")
        for layout, side in zip((self.source, self.target), self.sides, strict=True):
            _core.check_link_dims(self.dims, layout, f"link '{self.name}', {side}")

    @property
    def dims(self) -> Dims:
        return Dims(self.batch_dim, self.sequence_dim)
