"""tests/gpu: all of its stages on the CPU, and what its runner and its page make of stages that fail or hang."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

GPU = Path(__file__).parents[1] / "gpu"
sys.path.insert(0, str(GPU))

import page  # noqa: E402
import project_tests  # noqa: E402
import run_stages as run  # noqa: E402
import tracing  # noqa: E402


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    places = ["--out", str(folder / "out"), "--work", str(folder / "work")]
    command = [sys.executable, str(GPU / "run_stages.py"), "--dry", *places, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_stage_runs_dry(tmp_path):
    done = call(tmp_path)
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert done.returncode == 0, done.stdout
    assert list(found) == [stage.name for stage in run.STAGES if stage.dry]
    for name, stage in found.items():
        assert stage["status"] == "ok", (name, done.stdout)
        assert stage["results"]["cases"] or stage["results"]["left_out"], name
    assert len(found["parity"]["results"]["cases"]) > 50
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"results.json", "page.md", "logs.tar.gz"} <= files
    assert len(files) <= 8
    assert "Nothing failed." in (tmp_path / "out" / "page.md").read_text()


def test_an_installed_tessera_has_the_stages_that_need_no_checkout(tmp_path):
    command = [sys.executable, "-m", "tessera.gpu"]
    listed = subprocess.run([*command, "--list"], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert [line.split()[0] for line in listed.splitlines()] == [stage.name for stage in run.STAGES if stage.alone]
    subprocess.run([*command, "--dry", "env"], capture_output=True, check=True, cwd=tmp_path)
    assert "Nothing failed." in (tmp_path / "tessera-gpu" / "page.md").read_text()


def options(*arguments: str):
    return run.parsed(list(arguments))


def names(*arguments: str, runs=None) -> list[str]:
    return [stage.name for stage, _ in run.chosen(options(*arguments), runs or {})]


def test_stages_are_chosen():
    assert names() == [stage.name for stage in run.STAGES]
    assert "llama_7B" not in names("--dry")
    assert names("parity") == ["install", "parity"]
    assert names("trace", "parity", "env") == ["env", "install", "trace", "parity"]
    assert names("trace", "--beside", "pytests") == ["install", "trace", "pytests"]
    assert names("env") == ["env"]
    assert {stage.name: box for stage, box in run.chosen(options("pytests=300"), {})}["pytests"] == 300
    done = {"env": {"status": "ok"}, "parity": {"status": "timeout"}, "install": {"status": "ok"}}
    assert {"parity", "hazards", "install"} <= set(names("rest", runs=done))
    assert "env" not in names("rest", runs=done)
    with pytest.raises(SystemExit, match="no stage is called parrot"):
        names("parrot")


def runner(tmp_path: Path, seconds: float) -> run.Run:
    (tmp_path / "work").mkdir()
    return run.Run(options("--dry"), tmp_path / "work", tmp_path / "out", time.time() + seconds)


def test_a_stage_that_fails_or_hangs_stops_no_other(tmp_path, capsys):
    children = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {'import time; time.sleep(60)'!r}])"
    )
    for name, text in (
        ("crashes", "import os; os.abort()"),
        ("hangs", f"{children}; time.sleep(60)"),
        ("ends", "print('all is well')"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    one = runner(tmp_path, 60)
    found = {
        name: one.finish(one.start(run.Stage(name, box, (str(tmp_path / f"{name}.py"),), ""), box))
        for name, box in (("crashes", 20), ("hangs", 6), ("ends", 20))
    }
    assert found == {"crashes": "failed", "hangs": "timeout", "ends": "ok"}
    assert json.loads((tmp_path / "out" / "results.json").read_text())["hangs"]["status"] == "timeout"
    assert "hangs: timeout" in capsys.readouterr().out


def test_no_stage_begins_without_time(tmp_path):
    one = runner(tmp_path, 3)
    assert one.finish(one.start(run.STAGES[0], 30)) == "left out"


def test_a_stage_beside_others(tmp_path):
    """It starts when there is something to run, and may take as long as they do."""
    for name in ("a", "b", "install"):
        says = f"open({str(tmp_path / name)!r}, 'w').write(str(time.monotonic()))"
        (tmp_path / f"{name}.py").write_text(f"import time; {says}; time.sleep({2 if name == 'b' else 1})")
    stages = [(run.Stage(name, 20, (str(tmp_path / f"{name}.py"),), ""), 20) for name in ("install", "a", "b")]
    one = runner(tmp_path, 60)
    assert one.all_of(stages, "b")
    began = {name: float((tmp_path / name).read_text()) for name in ("a", "b", "install")}
    assert began["install"] + 1 <= began["b"] < began["a"] + 1
    assert [one.runs[name]["status"] for name in ("install", "a", "b")] == ["ok"] * 3


def test_cases_that_fail_are_on_the_page():
    cases = {"good": {"ok": True}, "bad": {"ok": False, "error": "ValueError: no"}, "off": {"ok": False, "differ": [1]}}
    stage = {"status": "failed", "seconds": 1, "results": {"cases": cases, "failed": ["bad", "off"], "left_out": ["x"]}}
    text = page.text({"parity": stage})
    assert "| parity | failed | 1 | 3 | 2 | 1 |" in text
    assert "- parity: bad: ValueError: no" in text
    assert "- parity: off: {'differ': [1]}" in text


def event(name: str, begin: float, long: float, cat: str = "cuda_runtime", **args):
    return {"name": name, "ts": begin, "dur": long, "cat": cat, "args": args}


def test_waits_are_counted_where_they_are():
    events = [
        event("phase forward", 0, 10, "user_annotation"),
        event("phase forward", 50, 10, "gpu_user_annotation"),  # of the device: says nothing of the host
        event("phase step", 20, 10, "user_annotation"),
        event("cudaStreamSynchronize", 21, 1),
        event("cudaEventSynchronize", 25, 1),
        event("cudaStreamSynchronize", 55, 1),
        event("cudaLaunchKernel", 5, 1),
    ]
    found = tracing.waits_within(events, ("phase forward", "phase step"))
    assert found == {"phase forward": {}, "phase step": {"cudaStreamSynchronize": 1, "cudaEventSynchronize": 1}}


def test_copies_beside_kernels():
    events = [
        event("a", 0, 10, "kernel", stream=7),
        event("tessera::kernels::cuda::b", 8, 6, "kernel", stream=7),
        event("c", 20, 10, "kernel", stream=7),
        event("Memcpy HtoD (Pinned -> Device)", 10, 12, "gpu_memcpy", bytes=12000, stream=9),
        event("Memcpy HtoD (Pinned -> Device)", 20, 20, "gpu_memcpy", bytes=1000, stream=11),
    ]
    found = tracing.summary(events)
    assert (found["span_us"], found["kernels_us"], found["largest_gaps_us"]) == (30, 24, [6])
    assert found["copies"]["Memcpy HtoD"] == {"us": 32.0, "beside_kernels": 0.5, "gb_s": 13 / 32}
    assert found["link_busy"] == {"HtoD": 0.75, "DtoH": 0.0}
    assert found["tessera kernels"] == {"b": [1, 6.0]}


@pytest.mark.parametrize(
    ("line", "name", "status"),
    [
        ("[gw3] [ 12%] PASSED tests/python/test_a.py::test_b[x-1] \n", "tests/python/test_a.py::test_b[x-1]", "PASSED"),
        ("tests/python/test_a.py::test_b FAILED         [ 50%]\n", "tests/python/test_a.py::test_b", "FAILED"),
        ("[gw0] [  1%] ERROR tests/python/test_a.py::test_c \n", "tests/python/test_a.py::test_c", "ERROR"),
    ],
)
def test_lines_of_pytest_are_understood(line, name, status):
    match = project_tests.LINE.search(line)
    assert (match[2] or match[3], match[1] or match[4]) == (name, status)
