"""The command `tessera`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

from tessera import __version__, _core, checkpoints, estimate, launch, report
from tessera._command import run
from tessera.errors import ConfigError, IoError

__all__ = ["main"]


def check(argv: Sequence[str] | None = None) -> int:
    """`tessera check CONFIG`: whether a configuration is valid and served, and what it resolves to."""
    return run(["check", *(sys.argv[1:] if argv is None else argv)])


def page(argv: Sequence[str] | None = None) -> int:
    """`tessera page RUN...`: a page of HTML of how runs went."""
    return run(["page", *(sys.argv[1:] if argv is None else argv)])


COMMANDS: dict[str, Callable[[Sequence[str] | None], int]] = {
    "launch": launch.main,
    "report": report.main,
    "estimate": estimate.main,
    "check": check,
    "page": page,
    **dict.fromkeys(("inspect", "export", "deepspeed", "universal"), checkpoints.main),
}


# Summaries of commands that are Python's alone; the core's say theirs themselves.
_SUMMARIES = {"launch": "Starts the ranks of this host."}


def _usage() -> str:
    lines = {**_SUMMARIES, **dict(_core.command_names())}
    return "usage: tessera COMMAND ...\n\n" + "".join(f"  {name:12}{lines[name]}\n" for name in COMMANDS)


def main(argv: Sequence[str] | None = None) -> int:
    """The command `tessera`; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    name = given[0] if given else ""
    command = COMMANDS.get(name)
    if name == "--version":
        print(__version__)
        return 0
    if command is None:
        asked = name in ("-h", "--help")
        print(_usage(), end="", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    try:
        return command(given if command is checkpoints.main else given[1:])
    except (ConfigError, IoError, NotImplementedError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
