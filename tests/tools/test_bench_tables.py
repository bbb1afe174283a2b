"""The benchmark `tables`: a tiny run end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "bench" / "run.py"
TINY = ["tables", "--quick", "--noisy", "--sizes", "tiny", "--steps", "12", "8", "6", "--rounds", "1"]
ON_CPU = ["--state-sizes", "tiny", "--device", "cpu"]


def run(out: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, PROGRAM, *TINY, "--out", out, *arguments]
    paths = filter(None, [path and str(path), os.environ.get("PYTHONPATH")])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=env)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The page and the figures of one run; fine-tuning on a folder of texts."""
    folder = tmp_path_factory.mktemp("tables")
    for name in ("train.txt", "valid.txt"):
        (folder / name).write_text("Stars are far away. " * 60)
    rows = ["bare", "tessera:1", "tessera:1+10"]
    done = run(folder / "out", *ON_CPU, "--peers", *rows, "--tune-data", str(folder))
    assert done.returncode == 0, done.stderr
    assert not done.stderr  # progress is for terminals
    page = (folder / "out" / "tables-1.md").read_text()
    assert done.stdout.strip() == page.strip()
    return page, json.loads((folder / "out" / "tables-1.json").read_text()), folder / "out"


def section(page: str, title: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its two first lines."""
    lines = page.split(f"## {title}\n")[1].split("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]


def test_report_has_both_tables(report):
    page, _, _ = report
    labels = ["bare loop", "Tessera 1", "Tessera 1, 10 bytes"]
    states = section(page, "What the states cost")
    assert [row[0] for row in states] == labels
    assert [row[1] for row in states] == ["16.0", "14.0", "10.0"]
    labels.insert(1, "bare loop, ties up")
    for title in ("Pre-training", "Fine-tuning"):
        losses = section(page, title)
        assert [row[0] for row in losses] == labels
        assert all(float(value) > 0 for row in losses for value in row[1:3])
    assert page.index("## Bits") < page.index("Goals:")


def test_index_has_its_goals(report):
    page, data, folder = report
    assert len(data["goals"]) == page.split("Goals:")[1].count("| yes |") + page.split("Goals:")[1].count("| no |")
    assert "[tables-1](tables-1.md)" in (folder / "README.md").read_text()


def test_exact_mode_has_the_bits_of_its_partner(report):
    page, data, _ = report
    for name in ("pre-training", "fine-tuning"):
        exact, partner = (data["train"][key]["0"][name] for key in ("tessera:1", "bare+up"))
        assert exact == partner
        assert len(exact["masters"]) == 64
    assert "bit for bit the same (every loss of 2 trainings" in page


def test_rows_differ_and_learn(report):
    _, data, _ = report
    runs = {key: data["train"][key]["0"] for key in data["train"]}
    assert runs["tessera:1"]["fine-tuning"]["masters"] != runs["tessera:1+10"]["fine-tuning"]["masters"]
    for run in runs.values():
        assert run["pre-training"]["held_out"] < run["pre-training"]["before"]
        assert run["fine-tuning"]["held_out"] == pytest.approx(runs["bare"]["fine-tuning"]["held_out"], abs=0.02)


def test_picture(report):
    page, _, folder = report
    assert "tables-1.png" in page
    assert (folder / "tables-1.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_run_ends_with_its_message(tmp_path):
    done = run(tmp_path / "out", *ON_CPU, "--peers", "bare", "--data", str(tmp_path / "missing.txt"))
    assert done.returncode == 1
    assert "tables: times of all engines, tiny failed" in done.stderr
    assert "missing.txt" in done.stderr
    assert not (tmp_path / "out").exists()


def test_on_a_device(tmp_path, stand_in):
    """It says that it has memory for one model of 1 M parameters: the rows of such get a process each, tiny ones take
    turns."""
    lines = [
        "import sys",
        f"sys.path.append({str(ROOT / 'tests' / 'stand_in')!r})",
        "import stand_in, torch",
        f"stand_in.load({str(stand_in)!r})",
        "torch.accelerator.get_memory_info = lambda: (38_000_000, 38_000_000)",
    ]
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
    rows = ["--peers", "bare", "tessera:1", "tessera:1+10", "--state-sizes", "tiny", "1M"]
    done = run(tmp_path / "out", "--device", "privateuseone", *rows, path=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out" / "tables-1-privateuseone.md").read_text()
    data = json.loads((tmp_path / "out" / "tables-1-privateuseone.json").read_text())
    assert [len(data["states"][size]["times"]) for size in ("tiny", "1M")] == [1, 3]
    for size, turns in (("tiny", "in which all rows take turns"), ("1M", "every row in a process of its own")):
        text = page.split(f"({size}), one sequence")[1]
        assert text.index("torch's allocations on the device") < text.index(turns) < text.index("| Tessera 1, 10 bytes")
    for size, low, high in (("tiny", 1.0, 1.2), ("1M", 1.0, 1.02)):  # padding weighs more in a small model
        for key, formula in (("tessera:1", 12), ("tessera:1+10", 8)):  # without gradients
            held = data["states"][size]["memory"][key]["allocated"] / data["states"][size]["parameters"]
            assert low <= held / formula <= high, (size, key, held)
    losses = [data["train"][key]["0"]["pre-training"]["final"] for key in ("tessera:1", "bare+up")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "python"))
    import run

    return run


def test_rows_that_do_not_fit_say_so(program, monkeypatch):
    """On an accelerator with too little memory; figures are made up."""
    from models import parameters_of
    from suites import tables, tables_text

    monkeypatch.setattr(sys, "argv", ["run.py", *TINY, *ON_CPU, "--peers", "tessera:1+10", "tessera:1+8"])
    setting = tables.settings_of(program.options(), "")
    phases = {"whole": {"median": 3.0, "min": 3.0, "max": 3.0}, "step": {"median": 1.0, "min": 1.0, "max": 1.0}}
    states = tables_text.States(
        parameters=parameters_of("tiny"),
        memory={"bare": {"out_of_memory": "too large"}, "tessera:1+10": {"allocated": 10**6, "peak": 2 * 10**6}},
        times=[
            {"out_of_memory": "too large"},
            {"whole": {"tessera:1+10": [0.003]}, "phases": {"tessera:1+10": phases}},
        ],
    )
    rows = [line.split(" | ") for line in tables_text.state_table(states, setting).splitlines()[2:]]
    assert [row[2:4] for row in rows] == [["does not fit", "does not fit"], ["1 MB (11.5)", "2 MB (22.9)"]]
    assert rows[1][5] == "-"  # there is nothing to divide by
    goals = tables_text.state_goals("tiny", states, setting)
    assert [goal.text for goal in goals] == ["Tessera 1, 10 bytes: allocated over formula"]
    assert "every row in a process of its own" in tables_text.state_text("tiny", states, setting)


def test_devices_that_are_not_there_are_refused(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", *TINY, "--device", "xla"])
    with pytest.raises(SystemExit, match="2"):
        program.options()
    assert "--device xla: this torch finds no such accelerator here" in capsys.readouterr().err
