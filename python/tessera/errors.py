"""Errors of the front end. Errors of the core arrive as the built-in classes (ValueError, RuntimeError,
NotImplementedError, torch.distributed.DistBackendError)."""

from __future__ import annotations

__all__ = ["ConfigError", "IoError", "UsageError"]


class ConfigError(ValueError, AssertionError):
    """A wrong argument or configuration. Also an AssertionError, for callers that expect one."""


class IoError(OSError):
    """A file or disk that fails, or contents that are damaged; names the file, nothing was changed."""


class UsageError(RuntimeError, AssertionError):
    """A call at the wrong moment; the message says which call to make instead."""
