"""Where an engine's micro-steps end, and when their gradients are reduced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tessera import _core


class Accumulation:
    """`managed`: the engine counts (managed_gradient_accumulation)."""

    def __init__(self, core: _core.Engine, managed: bool) -> None:
        self._core, self._managed = core, managed

    def is_gradient_accumulation_boundary(self) -> bool:
        """True when the next step() will update parameters."""
        return self._core.is_gradient_accumulation_boundary()

    def at_boundary(self) -> bool:
        """Whether step() is at a boundary: by the engine's count, or always where the program counts."""
        return not self._managed or self._core.is_gradient_accumulation_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Overrides the count for the present micro-batch; call it before its forward and backward."""
        self._core.set_gradient_accumulation_boundary(is_boundary)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients accumulate on this rank, without communication. Any stage; stage 2 holds a full gradient then."""
        self._core.begin_no_sync()
        try:
            yield
        finally:
            self._core.end_no_sync()

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Accumulates as no_sync, with one reduction for everything inside when it ends. Collective at the end. Who
        leaves by an error reduces nothing, since other ranks may not come to the end: it is as after no_sync."""
        self._core.begin_coalesce()
        try:
            yield
        except BaseException:
            self._core.leave_coalesce()
            raise
        self._core.end_coalesce()
