"""The kernels for CUDA as C++ for the host, behind the same table, to compare with. Needs no torch."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ["-std=c++20", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-Wno-unknown-pragmas", "-D__CUDA_ARCH__=800"]


FOLDER = ROOT / "tessera" / "kernels" / "cuda"


def sources() -> list[Path]:
    return [*sorted(FOLDER.glob("*.cu")), FOLDER / "device_table.cpp"]


def compile_for_the_host(to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    scratch = to.with_suffix(".new")
    folders = ["-I", str(ROOT / "tests" / "kernels" / "cuda" / "host"), "-I", str(ROOT)]
    subprocess.run(["g++", *OPTIONS, *folders, "-x", "c++", *map(str, sources()), "-o", str(scratch)], check=True)
    scratch.replace(to)


def up_to_date(library: Path) -> bool:
    return library.exists() and all(p.stat().st_mtime <= library.stat().st_mtime for p in FOLDER.iterdir())
