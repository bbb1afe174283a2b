"""Errors of the package. Those of the core arrive as the same classes (its value errors as ConfigError), what is not
served as NotImplementedError, a lost peer as torch.distributed.DistBackendError."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ConfigError", "IoError", "StageFailed", "UsageError"]


class ConfigError(ValueError, AssertionError):
    """A wrong argument or configuration. Also an AssertionError, for callers that expect one. `problems`: of a
    configuration, the path of each key with what is wrong."""

    problems: Sequence[tuple[str, str]] = ()


class IoError(OSError):
    """A file or disk that fails, or contents that are damaged; names the file, nothing was changed."""


class StageFailed(RuntimeError):
    """Another stage of a pipeline could not go on, in a batch or while it was built; the message is its error."""


class UsageError(RuntimeError, AssertionError):
    """A call at the wrong moment; the message says which call to make instead."""
