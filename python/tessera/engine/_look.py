"""What keeps a rank from an update, looked for before ranks exchange anything: Note [What ranks step by] in
tessera/engine/agreement.h."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tessera import _core
from tessera.engine._contents import Contents
from tessera.engine._joining import HasModule, Joining
from tessera.engine._updates import Updates


class Look:
    """Looks whether this rank can update. `settings`: the engine's configuration."""

    def __init__(
        self, engine: HasModule, settings: _core.Config, updates: Updates, joining: Joining, contents: Contents
    ) -> None:
        self._engine, self._updates, self._joining, self._contents = engine, updates, joining, contents
        self._core = updates.core
        self.in_backward: bool = settings.tessera.update_in_backward  # where the updates are, too
        self.looked: tuple[str, Exception | None] | None = None  # before step_together() steps

    def before_forward(self) -> None:
        """An error of one rank here would leave the others waiting: the step that follows announces it to all."""
        if self._updates.runner is None or not torch.is_grad_enabled():
            self._joining.follow()
        elif self.in_backward:  # the backward refuses what step() would
            self._core.set_fault(self.look(before_step=True)[0])
        else:
            self._followed()

    def _followed(self) -> Exception | None:
        """The error that parameters which begin to be trained give, if any."""
        try:
            self._joining.follow()
        except Exception as error:
            return error
        return None

    def look(self, before_step: bool) -> tuple[str, Exception | None]:
        """Returns what keeps this rank from an update, to be announced to the others, and the error behind it.
        Local."""
        if self.looked is not None:
            return self.looked
        problem = self._followed()
        if problem is None and before_step:
            try:
                self._updates.trained_by("step").before_step()
            except Exception as error:
                problem = error
        return self._contents.fault(self._engine.module) if problem is None else fault_text(problem), problem

    def before_norm(self) -> tuple[str, Exception | None]:
        """Does what look() does, without what happens once a step."""
        if self.looked is not None:
            return self.looked
        problem = self._followed()
        if problem is None:
            try:
                runner = self._updates.trained_by("grad_norm")
                runner.check_kept()
                runner.publish_groups()
            except Exception as error:
                problem = error
        return "" if problem is None else fault_text(problem), problem


@contextmanager
def own_error_first(problem: Exception | None) -> Iterator[None]:
    """Around a call that announces `problem` to all ranks: this one raises it itself, in the place of what the others
    have."""
    try:
        yield
    except Exception:
        if problem is not None:
            raise problem from problem.__cause__  # alone: what the others have says the same
        raise


def fault_text(error: Exception) -> str:
    """The error's text without our origin; errors of others with their class."""
    text = str(error)
    return re.sub(r"^\[[\w.]+\] ", "", text) if text.startswith("[") else f"{type(error).__name__}: {text}"
