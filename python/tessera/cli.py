"""The command `tessera`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from tessera import checkpoints, estimate, launch, report
from tessera._config import load_config
from tessera.errors import ConfigError, IoError

__all__ = ["main"]


def check(argv: Sequence[str] | None = None) -> int:
    """`tessera check CONFIG`: whether a configuration is valid and served, and what it resolves to."""
    parser = argparse.ArgumentParser(prog="tessera check", description=check.__doc__)
    parser.add_argument("config")
    parser.add_argument("--ranks", type=int, help="also the batch of so many data-parallel ranks")
    parser.add_argument("--all", action="store_true", help="also what the configuration does not mention")
    options = parser.parse_args(argv)
    loaded = load_config(options.config)
    print(loaded.describe(options.all))
    if options.ranks is not None:
        batch = loaded.resolve_batch(options.ranks)
        print(
            f"{options.ranks} ranks: {batch.train_batch_size} samples a step = micro batch {batch.micro_batch_size} x "
            f"{batch.gradient_accumulation_steps} accumulation steps x {options.ranks}"
        )
    for line in loaded.warnings:
        print(f"warning: {line}", file=sys.stderr)
    return 0


_COMMANDS: dict[str, Callable[[Sequence[str] | None], int]] = {
    "launch": launch.main,
    "report": report.main,
    "estimate": estimate.main,
    "check": check,
    **dict.fromkeys(("inspect", "export", "deepspeed", "universal"), checkpoints.main),
}


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    name = given[0] if given else ""
    command = _COMMANDS.get(name)
    if command is None:
        print(f"usage: tessera {{{','.join(_COMMANDS)}}} ...", file=sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    try:
        return command(given if command is checkpoints.main else given[1:])
    except (ConfigError, IoError, NotImplementedError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
