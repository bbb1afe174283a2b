"""The tutorial runs: its snippets one after the other, and its program on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tessera import cli

DOCS = Path(__file__).parents[2] / "docs"
SNIPPET = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.M | re.S)


def snippets(page: str) -> list[tuple[str, str, str]]:
    """(language, file or "", text) in order."""
    return [match.groups(default="") for match in SNIPPET.finditer((DOCS / page).read_text())]  # type: ignore[misc]


def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "tutorial"}
    run = 0
    for language, file, text in snippets("tutorial.md"):
        if language == "python" and not file:
            exec(compile(text, f"tutorial.md, snippet {run}", "exec"), names)
            run += 1
    assert run >= 8
    assert (tmp_path / "numbers" / "tutorial" / "Train_Samples_lr.csv").exists() and list(
        (tmp_path / "weights").iterdir()
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_its_program_runs_on_two_ranks(stage: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = snippets("tutorial.md")
    for _, file, text in found:
        if file:
            (tmp_path / file).write_text(text.replace('"stage": 2', f'"stage": {stage}'))
    (tmp_path / "model.py").write_text(found[0][2].partition("\n\ntorch.manual_seed(0)\n")[0] + "\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, sys.path))}

    assert cli.main(["check", str(tmp_path / "config.json")]) == 0
    assert "zero_optimization.stage" in capsys.readouterr().out
    command = [sys.executable, "-m", "tessera.cli", "launch", "--num_gpus", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"stage {stage}: loss " in done.stdout
