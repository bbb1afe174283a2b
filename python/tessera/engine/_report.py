"""What reaches the user through the logger "tessera"."""

from __future__ import annotations

import logging

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


def warn_of(lines: list[str]) -> None:
    for line in lines:
        logger.warning(line)
