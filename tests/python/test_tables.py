"""bench/tables, the program of `make tables`: a tiny run end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "bench" / "tables"
TINY = ["--size", "tiny", "--state-size", "tiny", "--steps", "12", "--tune-steps", "8", "--start-steps", "6"]
TINY += ["--seeds", "1", "--rounds", "1", "--rows", "2", "--device", "cpu"]


def run(out: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, PROGRAM, *TINY, "--out", out, *arguments]
    env = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The page and the figures of one run; fine-tuning on a folder of texts."""
    folder = tmp_path_factory.mktemp("tables")
    for name in ("train.txt", "valid.txt"):
        (folder / name).write_text("Stars are far away. " * 60)
    rows = ["plain", "tessera-14", "tessera-10"]
    done = run(folder / "out", "--contenders", *rows, "--tune-data", str(folder))
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
    labels = ["PyTorch, fp32 master", "Tessera, exact", "Tessera, 10 bytes"]
    states = section(page, "What the states cost")
    assert [row[0] for row in states] == labels
    assert [row[1] for row in states] == ["16.0", "14.0", "10.0"]
    labels.insert(1, "PyTorch, fp32 master, ties up")
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
        exact, partner = (data["train"][key]["0"][name] for key in ("tessera-14", "plain-ties-up"))
        assert exact == partner
        assert len(exact["masters"]) == 64
    assert "bit for bit the same (every loss of 2 trainings" in page


def test_rows_differ_and_learn(report):
    _, data, _ = report
    runs = {key: data["train"][key]["0"] for key in data["train"]}
    assert runs["tessera-14"]["fine-tuning"]["masters"] != runs["tessera-10"]["fine-tuning"]["masters"]
    for run in runs.values():
        assert run["pre-training"]["held_out"] < run["pre-training"]["before"]
        assert run["fine-tuning"]["held_out"] == pytest.approx(runs["plain"]["fine-tuning"]["held_out"], abs=0.02)


def test_picture(report):
    page, _, folder = report
    assert "tables-1.png" in page
    assert (folder / "tables-1.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_run_ends_with_its_message(tmp_path):
    done = run(tmp_path / "out", "--contenders", "plain", "--data", str(tmp_path / "missing.txt"))
    assert done.returncode == 1
    assert "tables: times of all, seed 0, rank 0 failed" in done.stderr
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
        "torch.accelerator.get_memory_info = lambda: (45_000_000, 45_000_000)",
    ]
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
    rows = ["--contenders", "plain", "tessera-14", "tessera-10", "--state-size", "tiny", "1M"]
    done = run(tmp_path / "out", "--device", "privateuseone", *rows, path=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out" / "tables-1-privateuseone.md").read_text()
    data = json.loads((tmp_path / "out" / "tables-1-privateuseone.json").read_text())
    assert [len(data["states"][size]["times"]) for size in ("tiny", "1M")] == [1, 3]
    for size, turns in (("tiny", "in which all rows take turns"), ("1M", "every row in a process of its own")):
        text = page.split(f"({size}), one sequence")[1]
        assert text.index("torch's allocations on the device") < text.index(turns) < text.index("| Tessera, 10 bytes")
    for size, low, high in (("tiny", 1.0, 1.2), ("1M", 1.0, 1.02)):  # padding weighs more in a small model
        for key, formula in (("tessera-14", 14), ("tessera-10", 10)):
            held = data["states"][size]["memory"][key]["allocated"] / data["states"][size]["parameters"]
            assert low <= held / formula <= high, (size, key, held)
    losses = [data["train"][key]["0"]["pre-training"]["final"] for key in ("tessera-14", "plain-ties-up")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


def test_rows_that_do_not_fit_say_so(monkeypatch):
    """On an accelerator with too little memory; figures are made up."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "python"))
    from tables import page, program, settings

    args = program.options(["--contenders", "tessera-10", "tessera-8", "--state-size", "tiny", "--device", "cpu"])
    setting = program.settings_of(args)
    phases = {"whole": {"median": 3.0, "min": 3.0, "max": 3.0}, "step": {"median": 1.0, "min": 1.0, "max": 1.0}}
    states = page.States(
        parameters=settings.parameters_of("tiny"),
        memory={"plain": {"out_of_memory": "too large"}, "tessera-10": {"allocated": 10**6, "peak": 2 * 10**6}},
        times=[{"out_of_memory": "too large"}, {"whole": {"tessera-10": [0.003]}, "phases": {"tessera-10": phases}}],
    )
    rows = [line.split(" | ") for line in page.state_table(states, setting).splitlines()[2:]]
    assert [row[2:4] for row in rows] == [["does not fit", "does not fit"], ["1 MB (33.4)", "2 MB (66.8)"]]
    assert rows[1][5] == "-"  # there is nothing to divide by
    goals = page.state_goals("tiny", states, setting)
    assert [goal.text for goal in goals] == ["Tessera, 10 bytes: allocated over formula"]
    assert "every row in a process of its own" in page.state_text("tiny", states, setting)


def test_devices_that_are_not_there_are_refused(tmp_path):
    done = run(tmp_path / "out", "--device", "xla")
    assert done.returncode == 2
    assert "--device xla: this torch finds no such accelerator here" in done.stderr
