"""The whole grid of the stand-in accelerator; tests/python has a sample of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "python" / "device_grid.py"


def test_the_whole_grid(stand_in: Path) -> None:
    count = min(os.cpu_count() or 1, 8)
    parts = [
        subprocess.Popen(
            [sys.executable, PROGRAM, stand_in, "--part", f"{i}/{count}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        for i in range(count)
    ]
    outputs = [part.communicate(timeout=1800)[0] for part in parts]
    assert not any(part.returncode for part in parts), "\n".join(outputs)[-20000:]
    assert sum(int(output.splitlines()[-1].split()[0]) for output in outputs) > 5000
