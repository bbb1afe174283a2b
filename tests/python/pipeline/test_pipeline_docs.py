"""The program of docs/pipeline.md runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import free_port

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("stages", [1, 2])
def test_the_program_of_the_documentation(tmp_path: Path, stages: int) -> None:
    found = re.search(r"```python\n(.*?)\n```", (ROOT / "docs" / "pipeline.md").read_text(), re.S)
    assert found is not None
    (tmp_path / "program.py").write_text(found.group(1).replace("num_stages=2", f"num_stages={stages}"))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    done = subprocess.run(
        [*command, tmp_path / "program.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"stage (\d) of \d: loss (\d+\.\d{3})", done.stdout)
    assert len(losses) == 2 and len({stage for stage, _ in losses}) == stages
    assert all(float(loss) < 1 for _, loss in losses) and len({loss for _, loss in losses}) == 1
    assert (tmp_path / "run" / "latest").read_text() == "global_step40"
