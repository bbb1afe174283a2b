"""Environments on top of another: what they add is theirs, the rest is seen. `make TORCH=system` has one over python3,
and needs neither network nor pip where nothing is missing.

    python3 tools/environment.py make VENV           a virtual environment that sees all packages of this python3
    VENV/bin/python tools/environment.py need FILE   installs what a requirements file names and no version is there of
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path

# Without them there is neither a build nor a test.
NEEDED = {"cmake", "ninja", "nlohmann-json", "numpy", "pytest", "scikit-build-core"}
NEVER = {"pip", "torch"}  # those that are there


def make(folder: Path) -> None:
    """Its own packages come first."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    home = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    # addsitedir() reads the .pth files there, those of packages that are being worked on.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in others]
    (home / "packages_of_python3.pth").write_text("".join(lines))


def requirements(file: Path) -> dict[str, list[str]]:
    """Name -> its lines, with those of the files that this one names."""
    found: dict[str, list[str]] = {}
    for line in file.read_text().splitlines():
        text = line.split(" #")[0].strip()
        if text.startswith("-r "):
            found |= requirements(file.parent / text[3:])
        elif text and not text.startswith("#"):
            found.setdefault(re.split(r"[=<>;\[ ]", text)[0], []).append(text)
    return found


def runs(program: str, least: tuple[int, int]) -> bool:
    path = shutil.which(program)
    said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout if path else ""
    version = re.search(r"(\d+)\.(\d+)", said)
    return version is not None and tuple(map(int, version.groups())) >= least


def compiles(header: str) -> bool:
    command = [os.environ.get("CXX", "c++"), "-x", "c++", "-E", "-"]
    return subprocess.run(command, input=f"#include <{header}>\n", capture_output=True, text=True).returncode == 0


# What need not be a package of Python.
ELSEWHERE: dict[str, Callable[[], bool]] = {
    "cmake": lambda: runs("cmake", (3, 24)),
    "ninja": lambda: runs("ninja", (1, 10)),
    "nlohmann-json": lambda: "NLOHMANN_JSON" in os.environ or compiles("nlohmann/json.hpp"),
}


def is_there(name: str) -> bool:
    if ELSEWHERE.get(name, lambda: False)():
        return True
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def install(lines: list[str]) -> bool:
    """With the torch that is there as a condition."""
    torch = f"torch=={importlib.metadata.version('torch')}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "missing.txt"
        file.write_text("\n".join([torch, *lines, ""]))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1"]
        return subprocess.run([*command, "-r", str(file)]).returncode == 0


def need(file: Path) -> int:
    """What the tests need on top of building they can do without."""
    asked = requirements(file)
    missing = [name for name in asked if name not in NEVER and not is_there(name)]
    if not missing or install([line for name in missing for line in asked[name]]):
        return 0
    missing = [name for name in missing if not install(asked[name])]
    if not missing:
        return 0
    print(
        f"[setup] missing, and pip could not get it: {', '.join(missing)}. Install it where torch is, or name a "
        "folder of wheels: PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER. cmake >= 3.24, ninja and nlohmann-json may be "
        "the system's; NLOHMANN_JSON=FOLDER has the headers, or their wheel",
        file=sys.stderr,
    )
    if file.name != "test.txt" or NEEDED & set(missing):
        return 1
    print("[setup] tests that use it are skipped", file=sys.stderr)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["make"] and len(sys.argv) == 3:
        make(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["need"] and len(sys.argv) == 3:
        sys.exit(need(Path(sys.argv[2])))
    else:
        sys.exit(__doc__)
