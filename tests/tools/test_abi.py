"""tools/abi.py."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import abi


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
def test_a_name_that_is_gone_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def library(source: str) -> str:
        (tmp_path / "a.cpp").write_text(source)
        made = tmp_path / "liba.so"
        subprocess.run(["c++", "-shared", "-fPIC", tmp_path / "a.cpp", "-o", made], check=True)
        return str(made)

    lists = tmp_path / "abi"
    one = library("namespace tessera { void step(int) {} void own(double) {} } void other() {}")
    assert abi.main([one], lists) == 0
    assert "there is no release" in capsys.readouterr().out
    assert abi.main([one, "--write"], lists) == 0
    assert abi.main([library("namespace tessera { void step(int) {} void own(double) {} int more; }")], lists) == 0
    assert "3 names, 0 gone" in capsys.readouterr().out
    assert abi.main([library("namespace tessera { void step(long) {} void own(double) {} }")], lists) == 1
    said = capsys.readouterr()
    assert "gone since the last release" in said.err and "tessera::step(int)" in said.err
    # A release keeps what the last one had, and what it adds stays from there on.
    assert abi.main([str(tmp_path / "liba.so"), "--write"], lists) == 1
    assert (
        abi.main([library("namespace tessera { void step(int) {} void own(double) {} int more; }"), "--write"], lists)
        == 0
    )
    assert abi.main([library("namespace tessera { void step(int) {} void own(double) {} }")], lists) == 1
    assert "tessera::more" in capsys.readouterr().err
