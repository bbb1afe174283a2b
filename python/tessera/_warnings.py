"""Warnings of Python's for what the core warns of, at the line of the program."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator

import torch

from tessera import _core

# Whose lines are no program's: this package, torch, contextlib.
_OTHERS = (os.path.dirname(__file__), os.path.dirname(torch.__file__), contextlib.__file__)


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
