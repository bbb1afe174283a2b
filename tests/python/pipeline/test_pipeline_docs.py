"""The program of docs/pipeline.md runs as it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support import run_program

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("stages", [1, 2])
def test_the_program_of_the_documentation(tmp_path: Path, stages: int) -> None:
    found = re.search(r"```python\n(.*?)\n```", (ROOT / "docs" / "pipeline.md").read_text(), re.S)
    assert found is not None
    (tmp_path / "program.py").write_text(found.group(1).replace("num_stages=2", f"num_stages={stages}"))
    printed = run_program([sys.executable, tmp_path / "program.py"], 2, tmp_path)
    losses = re.findall(r"stage (\d) of \d: loss (\d+\.\d{3})", "".join(printed))
    assert len(losses) == 2 and len({stage for stage, _ in losses}) == stages
    assert all(float(loss) < 1 for _, loss in losses) and len({loss for _, loss in losses}) == 1
    assert (tmp_path / "run" / "latest").read_text() == "global_step40"
