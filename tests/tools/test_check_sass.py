"""tools/check_sass.py finds in the machine code of a kernel what would make it slow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import check_sass

GOOD = [
    "S2R R0, SR_TID.X",
    "@P0 EXIT",
    "@P1 BRA 0x90",
    "IMAD.WIDE R2, R0, 0x10, R2",
    "LDG.E.EF.128 R4, desc[UR4][R2.64]",
    "LDG.E.EF.128 R8, desc[UR4][R12.64]",
    "FMUL R4, R4, R8",
    "STG.E.EF.128 desc[UR4][R2.64], R4",
    "EXIT",
    *["@!P2 LDG.E.U16 R4, desc[UR4][R2.64]"] * 8,
    *["@!P2 LDG.E.S16 R5, desc[UR4][R12.64]"] * 8,
    *["@!P2 STG.E.U16 desc[UR4][R2.64], R4"] * 8,
    "EXIT",
]


def said(code: list[str], name: str) -> str:
    lines = [f"        /*{16 * i:04x}*/                   {line} ;    /* 0x0 */" for i, line in enumerate(code)]
    return "\n".join([f"\t\tFunction : {name}", *lines])


@pytest.mark.parametrize(
    ("place", "line", "fault"),
    [
        (None, "", None),
        (5, "LDG.E.EF.128 R8, desc[UR4][R4.64]", "LDG.E.EF.128 at 0x50 waits for R4"),
        (5, "LDG.E.U16 R8, desc[UR4][R2.64]", "loads 16 bytes 16 at a time, where its elements have 34"),
        (5, "LDG.E.128 R8, desc[UR4][R12.64]", "LDG.E.128 at 0x50: no streaming hint"),
        (9, "@!P2 LDG.E R4, desc[UR4][R2.64]", "loads 32 bytes 16 at a time, where its elements have 34"),
        (25, "@!P2 STG.E.U8 desc[UR4][R2.64], R4", "stores 16 bytes 16 at a time, where its elements have 15"),
        (3, "STL [R1], R2", "STL at 0x30: local memory"),
        (7, "STG.E [R2.64], R4", "no store of 16 bytes"),
    ],
)
def test_a_kernel(place, line, fault, monkeypatch, capsys):
    code = list(GOOD)
    if place is not None:
        code[place] = line
    more = said(["LDG.E.EF.128 R4, desc[UR4][R2.64]", "EXIT"], "_Z10block_sumsv")
    text = "\n".join([said(code, "_Z13update_eightsv"), said(GOOD, "_Z10each_eightv"), more])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=text))
    assert check_sass.main("cuobjdump", "library.so", ["sm_90a"]) == (fault is not None)
    out = capsys.readouterr().out
    assert (fault or "sm_90a: 1 kernels update_eights, 1 to 1 instructions an element") in out


def test_branches_on_a_dtype_are_faults():
    code = [*GOOD[:5], "@P3 BRA 0x90", *GOOD[5:]]
    (kernel,) = check_sass.parse(said(code, "_Z13update_eightsv"))
    assert check_sass.faults(kernel) == ["1 branches among the loads of 16 bytes"]
    (kernel,) = check_sass.parse(said([*GOOD[:3], *["@P3 BRA 0x30"] * 4, *GOOD[3:]], "_Z13update_eightsv"))
    assert check_sass.faults(kernel) == ["5 branches before the first load of 16 bytes, at most 4"]


def test_no_kernel_is_a_fault(monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=""))
    assert check_sass.main("cuobjdump", "library.so", ["sm_80"]) == 1
    assert "no kernel each_eight for sm_80" in capsys.readouterr().out
