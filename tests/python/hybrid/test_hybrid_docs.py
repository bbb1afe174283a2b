"""The programs in docs/hybrid.md run as they stand, but for the port."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from link_ranks import RAY_ENVIRONMENT
from support import free_port, run_program

ROOT = Path(__file__).parents[3]
LINK, ACTORS = re.findall(r"```python\n(.*?)\n```", (ROOT / "docs" / "hybrid.md").read_text(), re.S)


def losses_of(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", text)]


def test_a_link(tmp_path):
    assert "29400" in LINK
    (tmp_path / "program.py").write_text(LINK.replace("29400", str(free_port())))
    printed = run_program([sys.executable, tmp_path / "program.py"], 4, tmp_path)
    losses = [losses for losses in map(losses_of, printed) if losses]
    assert [len(of_a_rank) for of_a_rank in losses] == [20, 20]
    assert all(of_a_rank[-1] < 0.8 * of_a_rank[0] for of_a_rank in losses)


def test_actor_groups(tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "program.py").write_text(ACTORS)
    paths = [os.path.abspath(path) for path in sys.path if path]
    environment = RAY_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}
    (loss,) = losses_of(run_program([sys.executable, tmp_path / "program.py"], 1, tmp_path, **environment)[0])
    assert loss < 8  # the variance of what it learns
    assert (tmp_path / "checkpoints" / "latest").read_text() == "last"
