"""Engines whose model is not on the CPU: programs of their own, because the device becomes the whole process's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def output_of(program: str, *arguments: object) -> str:
    command = [sys.executable, Path(__file__).parent / program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_engines_on_a_device(stand_in: Path) -> None:
    assert output_of("device_program.py", stand_in).count(": passed") == 14


def test_a_sample_of_the_grid(stand_in: Path) -> None:
    """tests/tools has all of it."""
    rows = int(output_of("device_grid.py", stand_in, "--sample").splitlines()[-1].split()[0])
    assert rows > 300
