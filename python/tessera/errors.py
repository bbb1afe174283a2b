"""Errors of the package. Errors of the core arrive as the same classes (its value errors as ConfigError), what is not
served as NotImplementedError, a lost peer as torch.distributed.DistBackendError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

__all__ = ["ConfigError", "IoError", "Problem", "StageFailed", "UsageError"]


class Problem(NamedTuple):
    """One thing that is wrong with a configuration: a key that does not exist, a value that is wrong by itself, keys
    that contradict each other (or a text that is no configuration), a number of ranks that the configuration does not
    fit."""

    path: str
    text: str
    kind: Literal["unknown", "value", "rule", "ranks"]


class ConfigError(ValueError, AssertionError):
    """A wrong argument or configuration. It is an AssertionError too, for callers that expect one. `problems`: what is
    wrong with a configuration."""

    problems: Sequence[Problem] = ()

    @property
    def origin(self) -> str:
        """What complains, as in "[origin] text"; "config" for a configuration."""
        head, bracket, _ = str(self).partition("] ")
        return head[1:] if bracket and head.startswith("[") else ""


class IoError(OSError):
    """A file or disk that fails, or contents that are damaged; names the file, nothing was changed."""


class StageFailed(RuntimeError):
    """Another stage of a pipeline could not go on, in a batch or while it was built; the message is its error."""


class UsageError(RuntimeError, AssertionError):
    """A call at the wrong moment; the message says which call to make instead."""
