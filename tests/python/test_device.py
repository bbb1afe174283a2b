"""Engines whose model is not on the CPU: the tests of device_program.py, in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_engines_on_a_device(stand_in: Path) -> None:
    command = [sys.executable, Path(__file__).parent / "device_program.py", stand_in]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": passed") == 14
