"""What reaches the user: progress lines without any set-up, warnings of the configuration once."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
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


def run_program(program: str, folder: Path, terminal: str | None = None) -> None:
    for descriptor, name in ((1, "out"), (2, "errors")):
        os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY), descriptor)
    if terminal is not None:
        os.dup2(os.open(terminal, os.O_RDWR), 2)
    sys.stderr = sys.__stderr__  # pytest's own, where it is forked
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
    for line in lines:
        assert re.fullmatch(
            r"\[tessera\] step=\d, skipped=0, lr=\[0.5\], mom=\[\(0.9, 0.999\)\], samples/s=[\d.e+]+, memory=0.0 MB",
            line,
        )


@pytest.mark.parametrize("end", ["sys.stderr.close()", "sys.stderr = None", "sys.stderr = open('elsewhere', 'w')"])
def test_progress_lines_go_where_standard_error_is_now(tmp_path: Path, end: str) -> None:
    program = PROGRAM.format(every=2, setup="").replace("for _", f"{end}\nfor _")
    program += "logging.shutdown()\nsys.stderr and not sys.stderr.closed and sys.stderr.flush()\n"
    process = PROCESSES.Process(
        target=run_program, args=(f"import os\nos.chdir({str(tmp_path)!r})\n{program}", tmp_path)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0 and "step=" not in (tmp_path / "errors").read_text()
    if "elsewhere" in end:
        assert (tmp_path / "elsewhere").read_text().count("[tessera] step=") == 2


def test_on_a_terminal_there_is_one_line(tmp_path: Path) -> None:
    """Of the loss, too, and of how many steps there are."""
    before_loop = (
        "engine.expect(4, tokens_per_sample=7)",
        "engine.monitor.writers['json'] = tessera.monitor.JsonLines('numbers')",
        "for _",
    )
    program = PROGRAM.format(every=100, setup="").replace("for _", "\n".join(before_loop))
    program = program.replace(".sum().backward()", ".sum()").replace("    engine(", "    loss = engine(")
    program = program.replace("    engine.step()", "    engine.backward(loss)\n    engine.step()\n    time.sleep(0.15)")
    program = f"import os, time\nimport tessera.monitor\nos.chdir({str(tmp_path)!r})\n{program}\nengine.destroy()\n"
    ours, theirs = os.openpty()
    process = PROCESSES.Process(target=run_program, args=(program, tmp_path, os.ttyname(theirs)))
    process.start()
    process.join(60)
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # nobody has the other end any more
        while part := os.read(ours, 4096):
            text += part
    os.close(ours)
    assert process.exitcode == 0, text
    *before, last = [line for line in text.decode().split("\r\x1b[K") if "step=" in line]
    assert len(before) == 3 and not any("\n" in line for line in before)
    assert re.match(r"\[tessera\] step=4/4 \[#{10}\], loss=\S+, samples/s=\S+, tokens/s=", last) and last.endswith(
        "\r\n"
    )
    lines = [json.loads(line) for line in (tmp_path / "numbers").read_text().splitlines()]
    names = [line["name"].split("/")[-1] for line in lines if "name" in line]  # others are warnings
    expected = {"train_loss", "lr", "grad_norm", "skipped_steps", "samples_per_second", "tokens_per_second"}
    assert expected | {"memory_bytes_params", "memory_bytes_states"} <= set(names)
    assert names.count("train_loss") == 4 and names.count("samples_per_second") == 3


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
