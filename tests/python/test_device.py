"""Engines whose model is not on the CPU: the tests of device_program.py, in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = "tests/stand_in/libtessera_privateuseone.so"


def test_engines_on_a_device() -> None:
    built = sorted((ROOT / "build").glob(f"*/{LIBRARY}"), key=lambda path: path.stat().st_mtime)
    if not built:
        pytest.skip("the stand-in accelerator is built with the C++ tests (make test-cpp)")
    command = [sys.executable, ROOT / "tests" / "python" / "device_program.py", built[-1]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": passed") == 9
