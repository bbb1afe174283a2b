"""What reaches the user through the logger "tessera"."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator

import torch

from tessera import _core

# Whose lines are no program's: this package, torch, contextlib.
_OTHERS = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__), contextlib.__file__)

logger = logging.getLogger("tessera")


class _Console(logging.StreamHandler):  # type: ignore[type-arg]
    """Standard error, while there is no handler of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[tessera] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if logger.handlers == [self] and not logging.getLogger().handlers:
            super().emit(record)


def show_progress() -> None:
    """Lets progress lines reach a user who has not set up logging; a set-up of their own is left alone."""
    if logger.hasHandlers():
        return
    logger.addHandler(_Console())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def shows_in_place() -> bool:
    """Lines go to standard error itself, by this module's console, and not to a set-up or a stream of the user's."""
    own = len(logger.handlers) == 1 and isinstance(logger.handlers[0], _Console) and not logging.getLogger().handlers
    return own and sys.stderr is sys.__stderr__ and logger.isEnabledFor(logging.INFO)


@contextlib.contextmanager
def caught_warnings(take: Callable[[list[str]], None]) -> Iterator[None]:
    """Gives `take` what the core warns of inside."""
    caught = _core.CaughtWarnings()
    try:
        yield
    finally:
        take(caught.stop())


def warn_user(lines: list[str]) -> None:
    """Warnings of Python's, at the line of the program that called this package."""
    for line in lines:
        depth, frame = 1, sys._getframe(0)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_OTHERS):
            depth, frame = depth + 1, frame.f_back
        warnings.warn(line, stacklevel=depth)


def warn_of(lines: list[str]) -> None:
    for line in lines:
        logger.warning(line)
