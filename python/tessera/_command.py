"""The core's commands (tessera/commands) as functions of Python: what they print goes to sys.stdout and sys.stderr."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

from tessera import _core
from tessera.errors import ConfigError, IoError


def _no_sizes(model: str, config: _core.Config) -> _core.ModelSizes:
    raise AssertionError(f"no sizes of {model}")


def guarded(command: Callable[[], int]) -> int:
    """Its exit code; of what a user does wrong the line that says it, and 1."""
    try:
        return command()
    except (ConfigError, IoError, NotImplementedError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def run(
    arguments: Sequence[str],
    sizes_of: Callable[[str, _core.Config], _core.ModelSizes] = _no_sizes,
    facts: Sequence[tuple[str, str]] = (),
) -> int:
    """Runs the command that `arguments` begin with. Returns its exit code: 0, 1 for an error, 2 for a line that cannot
    be read. `sizes_of`: sizes of a model's name; `facts`: of the report. What a hook raises for a wrong argument, a
    file or a limit is such an error, too."""
    try:
        code, output, errors = _core.run_command(list(arguments), sizes_of, list(facts))
    except (ValueError, OSError, NotImplementedError) as error:
        code, output, errors = 1, "", f"{error}\n"
    sys.stdout.write(output)
    sys.stderr.write(errors)
    return code
