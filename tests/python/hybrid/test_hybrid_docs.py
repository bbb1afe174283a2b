"""The programs in docs/hybrid.md run as they stand, but for the port."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from link_ranks import RAY_ENVIRONMENT
from support import free_port

ROOT = Path(__file__).parents[3]
LINK, ACTORS = re.findall(r"```python\n(.*?)\n```", (ROOT / "docs" / "hybrid.md").read_text(), re.S)


def run(command: list[str | Path], folder: Path) -> list[float]:
    """The losses that a program prints."""
    paths = [os.path.abspath(path) for path in sys.path if path]
    environment = os.environ | RAY_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(text) for text in re.findall(r"loss (\d+\.\d+)", done.stdout)]


def test_a_link(tmp_path):
    assert "29400" in LINK
    (tmp_path / "program.py").write_text(LINK.replace("29400", str(free_port())))
    ports = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", *ports, "program.py"]
    losses = run(command, tmp_path)
    assert len(losses) == 40  # of two ranks
    assert sum(losses[-2:]) < 0.8 * sum(losses[:2])


def test_actor_groups(tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "program.py").write_text(ACTORS)
    (loss,) = run([sys.executable, "program.py"], tmp_path)
    assert loss < 8  # the variance of what it learns
    assert (tmp_path / "checkpoints" / "latest").read_text() == "last"
