"""What reaches the user: progress lines without any set-up, warnings of the configuration once."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from support import PROCESSES, batch, config, make, run_mesh

import tessera

PROGRAM = """
import logging, sys
{setup}
import torch, tessera
model = torch.nn.Linear(2, 1)
adam = {{"type": "Adam", "params": {{"lr": 0.5}}}}
config = {{"train_batch_size": 1, "optimizer": adam, "steps_per_print": {every}, "data_parallel_size": 4}}
engine = tessera.initialize(model=model, config=config)[0]
for _ in range(4):
    engine(torch.ones(1, 2)).sum().backward()
    engine.step()
"""


def run_program(program: str, folder: Path) -> None:
    for descriptor, name in ((1, "out"), (2, "errors")):
        os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY), descriptor)
    exec(program, {})


def stderr_of(folder: Path, every: object, setup: str = "") -> list[str]:
    process = PROCESSES.Process(target=run_program, args=(PROGRAM.format(every=every, setup=setup), folder))
    process.start()
    process.join(60)
    assert process.exitcode == 0 and not (folder / "out").read_text()
    errors = (folder / "errors").read_text().splitlines()
    return [line for line in errors if "step=" in line or "data_parallel_size" in line]


def test_progress_lines_reach_who_has_no_logging(tmp_path: Path) -> None:
    warning, *lines = stderr_of(tmp_path, 2)
    assert "data_parallel_size: has no effect in this version" in warning
    assert [line.split(",")[0] for line in lines] == ["[tessera] step=2", "[tessera] step=4"]
    assert all("lr=[0.5]" in line for line in lines)


def test_without_steps_per_print_nothing_is_said(tmp_path: Path) -> None:
    assert [line for line in stderr_of(tmp_path, None) if "step=" in line] == []


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        ("logging.basicConfig(format='mine %(message)s', level='INFO')", ["mine step=2", "mine step=4"]),
        ("logging.basicConfig(level='WARNING')\nlogging.getLogger('tessera').setLevel('WARNING')", []),
        ("logging.getLogger('tessera').addHandler(logging.NullHandler())", []),
    ],
)
def test_the_users_own_logging_rules(setup: str, expected: list[str], tmp_path: Path) -> None:
    lines = [line.split(",")[0] for line in stderr_of(tmp_path, 2, setup) if "step=" in line]
    assert lines == expected


@pytest.mark.parametrize("axis", ["dp", "sp", "tp"])
def test_warnings_come_from_one_rank(axis: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tessera")
    models = [make(), make()]

    def body(rank: int, mesh: tessera.Mesh) -> None:
        engine = tessera.Engine(models[rank], config(1, data_parallel_size=4), group=mesh)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            engine(*batch(rank))
        engine.destroy()

    run_mesh(body, **{axis: 2})
    words = ("data_parallel", "without autocast")
    lines = [record.message for record in caplog.records if any(word in record.message for word in words)]
    assert len(lines) == 2 and "switched off inside" in lines[1]
    assert (
        lines[0] == "data_parallel_size: has no effect in this version; the process group says how many ranks there are"
    )
