"""What keeps a rank from an update, looked for before ranks meet: Note [What ranks step by] in
tessera/engine/agreement.h."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch

from tessera.engine._preflight import check_all_used

if TYPE_CHECKING:
    from tessera.engine._engine import Engine


class EngineLook:
    """What an Engine does of it."""

    _looked: tuple[str, Exception | None] | None = None  # before step_together() steps

    def _look_before_forward(self) -> None:
        """An error of one rank here would leave the others waiting: the step that follows tells all."""
        engine = cast("Engine", self)
        if engine._runner is None or not torch.is_grad_enabled():
            engine._follow_params()
        elif engine._updates_in_backward:  # which then refuses what step() would
            engine.core.set_fault(self._look(before_step=True)[0])
        else:
            self._followed()

    def _followed(self) -> Exception | None:
        """What speaks against the parameters that begin to be trained."""
        try:
            cast("Engine", self)._follow_params()
        except Exception as error:
            return error
        return None

    def _look(self, before_step: bool) -> tuple[str, Exception | None]:
        """What keeps this rank from an update, for the others to hear, and the error behind it. Local."""
        engine = cast("Engine", self)
        if self._looked is not None:
            return self._looked
        problem = self._followed()
        if problem is None and before_step:
            try:
                engine._trainable("step").before_step()
                if engine._wants_all_used:
                    check_all_used(engine.core, engine._optimized)
            except Exception as error:
                problem = error
        return engine._contents.fault(engine.module) if problem is None else told(problem), problem

    def _look_before_norm(self) -> tuple[str, Exception | None]:
        """As _look(), without what happens once a step."""
        engine = cast("Engine", self)
        if self._looked is not None:
            return self._looked
        problem = self._followed()
        if problem is None:
            try:
                runner = engine._trainable("grad_norm")
                runner.check_kept()
                runner.publish_groups()
            except Exception as error:
                problem = error
        return "" if problem is None else told(problem), problem


@contextmanager
def own_error_first(problem: Exception | None) -> Iterator[None]:
    """Around a call that all ranks are told `problem` in: this one raises it itself, above what the others have."""
    try:
        yield
    except Exception:
        if problem is not None:
            raise problem  # noqa: B904 (what the others have stands above it)
        raise


def told(error: Exception) -> str:
    """Without our origin; those of others with their class."""
    text = str(error)
    return re.sub(r"^\[[\w.]+\] ", "", text) if text.startswith("[") else f"{type(error).__name__}: {text}"
