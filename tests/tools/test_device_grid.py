"""The whole grid of the stand-in accelerator, and its sample on several ranks; tests/python has parts of both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "python" / "device_grid.py"


def outputs_of(commands: list[list[object]]) -> list[str]:
    programs = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        for command in commands
    ]
    outputs = [program.communicate(timeout=1800)[0] for program in programs]
    assert not any(program.returncode for program in programs), "\n".join(outputs)[-20000:]
    return outputs


def test_the_whole_grid(stand_in: Path) -> None:
    count = min(os.cpu_count() or 1, 8)
    outputs = outputs_of([[PROGRAM, stand_in, "--part", f"{i}/{count}"] for i in range(count)])
    assert sum(int(output.splitlines()[-1].split()[0]) for output in outputs) > 5000


@pytest.mark.parametrize(("ranks", "part"), [(2, "0/1"), (4, "0/8")])
def test_its_sample_on_ranks(ranks: int, part: str, stand_in: Path) -> None:
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", PROGRAM]
    [output] = outputs_of([[*run, stand_in, "--sample", "--part", part]])
    assert output.count(", 0 failed") == ranks
