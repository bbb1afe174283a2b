"""The command `tessera`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from tessera import __version__, _core, checkpoints, estimate, launch, report
from tessera._command import guarded, run

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

_MORE = "\ntessera COMMAND --help says what it takes; tessera --version.\n"

# Summaries of commands that are Python's alone; the core's say theirs themselves.
_SUMMARIES = {"launch": "Starts the ranks of this host."}


def _usage() -> str:
    lines = {**_SUMMARIES, **dict(_core.command_names())}
    return "usage: tessera COMMAND ...\n\n" + "".join(f"  {name:12}{lines[name]}\n" for name in COMMANDS) + _MORE


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
        if name and not asked:
            near = [f"; did you mean '{other}'?" for other in _core.all_nearest(name, list(COMMANDS))[:1]]
            print(f"tessera: there is no command '{name}'{''.join(near)}\n", file=sys.stderr)
        print(_usage(), end="", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    return guarded(lambda: command(given if command is checkpoints.main else given[1:]))


if __name__ == "__main__":
    sys.exit(main())
