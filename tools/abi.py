"""Whether a library still has all names that the last release of its binary interface had.

    python tools/abi.py LIBRARY             compare with cmake/abi/MAJOR.MINOR.txt
    python tools/abi.py LIBRARY --write     a release: this is the list from here on, where no name is gone

Names are those of exported functions and objects in `tessera::`, with their arguments. One that is gone breaks programs
that were linked before; a new one does not. Another minor version has an interface, and a list, of its own.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def names_of(library: Path) -> set[str]:
    done = subprocess.run(
        ["nm", "--dynamic", "--defined-only", "--demangle", str(library)], check=True, capture_output=True, text=True
    )
    lines = (line.split(" ", 2) for line in done.stdout.splitlines())
    return {line[2] for line in lines if len(line) == 3 and re.search(r"\btessera::", line[2])}


def interface() -> str:
    text = (ROOT / "tessera" / "base" / "version.h").read_text()
    found = re.search(r'TESSERA_VERSION "(\d+\.\d+)', text)
    assert found is not None
    return found[1]


def main(argv: list[str] | None = None, folder: Path = ROOT / "cmake" / "abi") -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("library", type=Path)
    made.add_argument("--write", action="store_true", help="make the list")
    options = made.parse_args(argv)
    listed = folder / f"{interface()}.txt"
    names = names_of(options.library)
    before = set(listed.read_text().splitlines()) if listed.exists() else set()
    gone = sorted(before - names)
    for name in gone:
        print(f"gone since the last release of interface {interface()}: {name}", file=sys.stderr)
    if not before and not options.write:
        print(f"there is no release of interface {interface()} to compare with")
        return 0
    print(f"{len(names)} names, {len(gone)} gone")
    if gone:
        return 1
    if options.write:
        folder.mkdir(parents=True, exist_ok=True)
        listed.write_text("".join(f"{name}\n" for name in sorted(names)))
        print(f"{listed.name} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
