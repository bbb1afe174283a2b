"""tools/check_ptxas.py reads what ptxas says of a kernel, and refuses spills, stacks and too many registers."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import check_ptxas

SAID = """[1/3] Building CUDA object update.cu.o
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4copyv' for 'sm_90a'
ptxas info    : Function properties for _Z4copyv
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 0 barriers, 380 bytes cmem[0]
ptxas info    : Compile time = 2.512 ms
"""


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"registers": check_ptxas.REGISTERS}, None),
        ({"registers": check_ptxas.REGISTERS + 1}, "_Z4copyv (sm_90a): 65 registers"),
        ({"stack": 8}, "8 bytes of stack"),
        ({"stores": 4}, "4 bytes of spills"),
        ({"loads": 12}, "12 bytes of spills"),
    ],
)
def test_a_kernel(change, fault, monkeypatch, capsys):
    said = SAID.format(**{"stack": 0, "stores": 0, "loads": 0, "registers": 30} | change)
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    assert check_ptxas.main(["sm_90a"]) == (fault is not None)
    out = capsys.readouterr().out
    assert out.startswith("[1/3] Building") and "ptxas info" not in out
    assert (fault or "sm_90a: 1 kernels") in out


@pytest.mark.parametrize("said", ["", SAID.format(stack=0, stores=0, loads=0, registers=30)])
def test_nothing_compiled_is_a_fault(said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    assert check_ptxas.main(["sm_80"]) == 1
    assert "no kernel was compiled for sm_80" in capsys.readouterr().out
