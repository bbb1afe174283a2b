"""tools/environment.py: an environment over another, and what is missing in it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import environment

PROGRAM = "import importlib.metadata as m, sys; print(sys.prefix, m.version('torch'), m.version('pytest'))"


def test_an_environment_sees_the_packages_below(tmp_path):
    environment.make(tmp_path / "venv")
    done = subprocess.run([tmp_path / "venv/bin/python", "-c", PROGRAM], capture_output=True, text=True, check=True)
    versions = [importlib.metadata.version(name) for name in ("torch", "pytest")]
    assert done.stdout.split() == [str(tmp_path / "venv"), *versions]


@pytest.mark.parametrize(
    ("name", "text", "code", "said"),
    [
        ("build.txt", "torch==0.0.1\npytest==0.0.1  # any version will do\n", 0, ""),
        ("build.txt", "no-such-package==1.0; python_version >= '3.0'\n", 1, "missing"),
        ("lint.txt", "-r build.txt\n", 1, "missing"),
        ("test.txt", "no-such-package\n", 0, "are skipped"),
        ("test.txt", "no-such-package\nscikit-build-core\n", 1, "missing"),
    ],
)
def test_need(name, text, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    if "scikit-build-core" in text:
        monkeypatch.setattr(environment, "is_there", lambda package: False)
        monkeypatch.setattr(environment, "install", lambda lines: False)
    (tmp_path / "build.txt").write_text("no-such-package\n")
    (tmp_path / name).write_text(text)
    assert environment.need(tmp_path / name) == code
    err = capsys.readouterr().err
    assert said in err and ("no-such-package" in err) == bool(said)
