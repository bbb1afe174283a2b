"""tessera launch and tessera-run: ranks of one host, of one of several, exit codes, texts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import pytest
from support import free_port
from tessera.errors import ConfigError

from tessera import launch

ROOT = Path(__file__).parents[2]
RUN = Path(os.environ.get("TESSERA_BUILD_DIR", ROOT / "build" / "release")) / "commands" / "tessera-run"
# What starts the launcher, and what it needs before a program that is Python.
LAUNCHERS = {"launch": ([sys.executable, "-m", "tessera.launch"], []), "run": ([str(RUN)], [sys.executable])}

BAD_PORTS = ["0", "-1", "65536", "99999999999", "x", "1.5", ""]
ROUTES = [
    (["--num_gpus", "2"], ([0, 1], False, 1, 0, "")),
    ([], ([0, 1, 2, 3], False, 1, 0, "")),
    (["--num_nodes", "3", "--node_rank", "2", "--master_addr", "x"], ([0, 1, 2, 3], False, 3, 2, "x")),
    (["--node_rank", "1"], "--node_rank 0 to 0, got 1"),
    (["--num_nodes", "2", "--master_addr", "a"], "--node_rank 0 to 1, got -1"),
    (["--num_nodes", "2", "--node_rank", "0"], "needs --master_addr"),
    (["--num_nodes", "2", "--node_rank", "2", "--master_addr", "a"], "got 2"),
    (["--num_gpus", "0"], "--num_gpus must be a number from 1"),
    (["-n", "-2"], "-n must be a number from 1"),
    (["--num-nodes", "x"], "--num-nodes must be a number from 1"),
    *((["--master_port", port], f"--master_port must be a number from 1 to 65535, got '{port}'") for port in BAD_PORTS),
    (["--module", "--no_python"], "exclude each other"),
]
# What is found by looking at this machine, before any rank starts.
MACHINE = [
    (["--master_addr", "no.such.host.invalid"], "--master_addr no.such.host.invalid is no host that is known here ("),
    (["--num_nodes", "2", "--node_rank", "1", "--master_addr", "no.such.host.invalid"], "--master_addr no.such.host"),
    (["--log_dir", "/dev/null"], "--log_dir /dev/null is no folder that can be written into ("),
    (["--enable_each_rank_log", "/dev/null/logs"], "--log_dir /dev/null/logs is no folder that can be written into ("),
]


@pytest.mark.parametrize(("arguments", "expected"), ROUTES)
def test_which_ranks_a_host_starts(arguments: list[str], expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def run_here(options: Any, *how: Any) -> int:
        found.append((*how, options.master_addr))
        return 3

    monkeypatch.setattr(launch, "run_here", run_here)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            launch.main([*arguments, "program.py"])
    else:
        assert launch.main([*arguments, "program.py"]) == 3 and found == [expected]


class Start(Protocol):
    def __call__(self, options: list[Any], program: Any, *arguments: Any, python: bool = True) -> Any: ...


@pytest.fixture(params=LAUNCHERS)
def start(request: pytest.FixtureRequest) -> Start:
    """A launcher with a program, which is Python or else any."""
    command, before = LAUNCHERS[request.param]
    if request.param == "run" and not RUN.exists():
        pytest.skip("tessera-run is built with the library (make test-cpp)")

    def started(options: list[Any], program: Any, *arguments: Any, python: bool = True) -> subprocess.Popen[str]:
        words = [*options, *(before if python else ["--no_python"]), program, *arguments]
        return subprocess.Popen([*command, *map(str, words)], stderr=subprocess.PIPE, text=True)

    return started


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(given, says) for given, says in ROUTES if isinstance(says, str) and "--module" not in given],
)
def test_both_refuse_alike(start: Start, arguments: list[str], says: str) -> None:
    child = start(arguments, "program.py")
    errors = child.communicate(timeout=120)[1]
    assert child.returncode == 1 and says in errors


@pytest.mark.parametrize(("arguments", "says"), MACHINE)
def test_what_ranks_would_wait_for_in_vain_is_refused(
    start: Start, arguments: list[str], says: str, tmp_path: Path
) -> None:
    child = start(["-n", 1, *arguments], "/bin/touch", tmp_path / "ran", python=False)
    errors = child.communicate(timeout=120)[1]
    assert child.returncode == 1 and errors.startswith(f"[launch] {says}") and errors.count("\n") == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_program_that_is_missing_is_named(launcher: str) -> None:
    if launcher == "run" and not RUN.exists():
        pytest.skip("tessera-run is built with the library (make test-cpp)")
    done = subprocess.run([*LAUNCHERS[launcher][0], "-n", "1"], stderr=subprocess.PIPE, text=True, timeout=120)
    name = {"launch": "tessera launch", "run": "tessera-run"}[launcher]
    assert done.returncode == 2 and f"the program is missing: {name} [options] program arguments..." in done.stderr


def test_tasks_of_srun_are_no_worlds_of_their_own(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    child = start([], "program.py")
    errors = child.communicate(timeout=120)[1]
    assert child.returncode == 1 and "[launch] SLURM_NTASKS is 2: each of these processes would start" in errors
    meant = start(["-n", 1, "--num_nodes", 1], "/bin/true", python=False)
    assert meant.wait(timeout=120) == 0


def test_ranks_of_one_host(start: Start, launched_program: Path, tmp_path: Path) -> None:
    port = free_port()
    child = start(["-n", 2, "--master_port", port], launched_program, tmp_path, 'quoted "text"', "x=1")
    assert child.wait(timeout=120) == 0
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == f'{rank} 2 {rank} 2 0 1 {port}|quoted "text"|x=1'


def test_ranks_of_two_hosts_that_are_started_by_hand(start: Start, launched_program: Path, tmp_path: Path) -> None:
    port = free_port()
    job = ["--num_nodes", 2, "--num_gpus", 1, "--master_addr", "127.0.0.1", "--master_port", port]
    children = [start([*job, "--node_rank", node], launched_program, tmp_path) for node in range(2)]
    assert [child.wait(timeout=180) for child in children] == [0, 0]
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == f"{rank} 2 0 1 {rank} 2 {port}|"


def test_the_first_failure_ends_all_and_is_shown_last(start: Start, launched_program: Path, tmp_path: Path) -> None:
    child = start(["--nproc-per-node", 2, "--log-dir", tmp_path / "logs"], launched_program, tmp_path, "fail")
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 1
    assert "[rank 1] the reason\n" in errors
    assert errors.rstrip().endswith("[launch] rank 1 failed first (exit code 1):\nthe reason")
    assert [file.read_text() for file in (tmp_path / "logs").glob("**/1/stderr.log")] == ["the reason\n"]


SHOWN = ["MASTER_ADDR", "OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"]


def test_what_else_ranks_find(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = tmp_path / "program.sh"
    script.write_text(f'#!/bin/sh\necho "{" ".join("$" + name for name in SHOWN)}" > "$1/$RANK"\n')
    script.chmod(0o755)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert start(["-n", 2], script, tmp_path, python=False).wait(timeout=120) == 0
    assert (tmp_path / "1").read_text() == f"127.0.0.1 {threads} 2 0 1\n"


def test_programs_that_are_not_python_and_exit_codes(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "program.sh"
    script.write_text('#!/bin/sh\necho "$RANK $*" > "$1/$RANK"\nexit 7\n')
    script.chmod(0o755)
    child = start(["--num-gpus", 1], script, tmp_path, "b c", python=False)
    child.communicate(timeout=120)
    assert child.returncode == 7 and (tmp_path / "0").read_text() == f"0 {tmp_path} b c\n"


def test_signals_reach_the_ranks(start: Start, launched_program: Path, tmp_path: Path) -> None:
    child = start(["--num_gpus", 1], launched_program, tmp_path, "wait")
    deadline = time.monotonic() + 60
    while not (tmp_path / "0").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=60)[1] == "[launch] interrupted by SIGTERM; all ranks have ended\n"
    assert child.returncode == 128 + signal.SIGTERM
