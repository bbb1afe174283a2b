"""What reaches the user through the logger "tessera"."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("tessera")


class _Console(logging.StreamHandler):  # type: ignore[type-arg]
    """Standard error as it is now, while it is open and there is no handler of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[tessera] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if logger.handlers == [self] and not logging.getLogger().handlers and _is_open(sys.stderr):
            self.stream = sys.stderr
            super().emit(record)


def _is_open(stream: object) -> bool:
    return stream is not None and not getattr(stream, "closed", False)


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
    return own and sys.stderr is sys.__stderr__ and _is_open(sys.stderr) and logger.isEnabledFor(logging.INFO)


def warn_of(lines: list[str]) -> None:
    for line in lines:
        logger.warning(line)
