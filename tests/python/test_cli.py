"""The command `tessera`: what it hands on, `tessera check`, and how errors end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import config

import tessera
from tessera import cli


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({**config(2), "unknown_thing": 1}))
    assert cli.main(["check", str(file), "--ranks", "3"]) == 0
    out, errors = capsys.readouterr()
    assert "zero_optimization.stage = 2 (given)" in out and "12 samples a step = micro batch 4 x 1" in out
    assert "unknown_thing" in errors
    file.write_text(json.dumps({"zero_optimization": {"stage": 9, "stagee": 1}}))
    assert cli.main(["check", str(file)]) == 1
    errors = capsys.readouterr().err
    assert "2 problems" in errors and "stagee" in errors


def test_other_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["inspect"], ["export", "out"], ["universal", "out"]):
        assert cli.main([command[0], str(tmp_path), *command[1:]]) == 1 and "latest" in capsys.readouterr().err
    assert cli.main(["report", "--json"]) == 0
    assert cli.main(["estimate", "1M", "--ranks", "1"]) == 0
    assert cli.main(["launch", "--node_rank", "1", "p.py"]) == 1
    assert "--node_rank 0 to 0" in capsys.readouterr().err
    assert cli.main([]) == 2 and cli.main(["nothing"]) == 2
    capsys.readouterr()
    assert cli.main(["--help"]) == 0
    *lines, empty, more = capsys.readouterr().out.splitlines()[2:]
    assert (empty, more) == ("", "tessera COMMAND --help says what it takes; tessera --version.")
    assert [line.split()[0] for line in lines] == list(cli.COMMANDS) and all(line.endswith(".") for line in lines)
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out == f"{tessera.__version__}\n"
