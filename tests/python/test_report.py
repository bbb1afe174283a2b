"""tessera report says what is there, for people and for programs."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from tessera import report


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"] == torch.__version__ and found["cores"] >= 1 and "gloo" in found["transports"]
    assert {entry["folder"] for entry in found["disk"]} >= {"/dev/shm"}
    assert report.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].strip() for line in lines if not line.startswith("  ")] == list(found)
    assert [line.strip() for line in lines if line.startswith("  ")] == found["missing for more"]
    for name in ("wandb", "comet_ml"):
        assert any(name in line for line in found["missing for more"]) == (importlib.util.find_spec(name) is None)
    assert ("train on the CPU" in str(found["missing for more"])) == (found["devices"] == [])


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere at all")
    assert report.main(["--json"]) == 0
    assert {"folder": "/nowhere at all", "free_gb": None} in json.loads(capsys.readouterr().out)["disk"]
