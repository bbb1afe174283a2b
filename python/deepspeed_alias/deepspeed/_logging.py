"""deepspeed.utils.logging: the logger of Tessera under the names that callers use."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable

import torch.distributed as dist

logger = logging.getLogger("tessera")
"""One for both: its level rules what Tessera says."""

log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


class LoggerFactory:
    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.INFO) -> logging.Logger:
        made = logging.getLogger(name)
        made.setLevel(level)
        return made


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else -1


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on these ranks; -1, and no ranks, are all."""
    rank = _rank()
    if _is_of(ranks, rank):
        logger.log(level, "[Rank %d] %s", rank, message)


def _is_of(ranks: Iterable[int] | None, rank: int) -> bool:
    wanted = list(ranks or [-1])
    return -1 in wanted or rank in wanted or rank == -1


@functools.lru_cache(None)
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    _log_once(message, None if ranks is None else tuple(ranks), level)


def get_dist_msg(message: str, ranks: Iterable[int] | None = None) -> str | None:
    """The message with the rank before it; None on other ranks."""
    rank = _rank()
    return f"[Rank {rank}] {message}" if _is_of(ranks, rank) else None


def print_dist(message: str, ranks: Iterable[int] | None = None) -> None:
    text = get_dist_msg(message, ranks)
    if text is not None:
        print(text)


def print_configuration(args: object, name: str) -> None:
    logger.info("%s:", name)
    for key, value in sorted(vars(args).items()):
        logger.info("  %s %s", key.ljust(29, "."), value)


def print_json_dist(message: dict[str, object], ranks: Iterable[int] | None = None, path: str | None = None) -> None:
    """Writes the message, with the rank, to a file."""
    rank = _rank()
    if path is not None and _is_of(ranks, rank):
        with open(path, "w") as file:
            json.dump({**message, "rank": rank}, file)


@functools.lru_cache(None)
def warning_once(message: str) -> None:
    logger.warning(message)


vars(logger).update(warning_once=warning_once, log_dist_once=log_dist_once)  # callers find them there


def print_rank_0(message: str, debug: bool = False, force: bool = False) -> None:
    if _rank() in (-1, 0) and (debug or force):
        logger.info(message)


def get_log_level_from_string(log_level_str: str) -> int:
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise ValueError(f"[deepspeed] log level must be one of {', '.join(log_levels)}, got {log_level_str!r}")
    return level


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))


def get_current_level() -> int:
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    return logger.getEffectiveLevel() <= log_levels[max_log_level_str.lower()]
