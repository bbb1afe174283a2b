"""tessera launch: ranks of one host, of one of several, exit codes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import free_port
from tessera.errors import ConfigError

from tessera import launch

ROUTES = [
    (["--num_gpus", "2"], ([0, 1], False, 1, 0, "")),
    ([], ([0, 1, 2, 3], False, 1, 0, "")),
    (["--num_nodes", "3", "--node_rank", "2", "--master_addr", "x"], ([0, 1, 2, 3], False, 3, 2, "x")),
    (["--node_rank", "1"], "--node_rank 0 to 0, got 1"),
    (["--num_nodes", "2", "--master_addr", "a"], "--node_rank 0 to 1, got -1"),
    (["--num_nodes", "2", "--node_rank", "0"], "needs --master_addr"),
    (["--num_nodes", "2", "--node_rank", "2", "--master_addr", "a"], "got 2"),
    (["--module", "--no_python"], "exclude each other"),
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


def start(*command: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tessera.launch", *map(str, command)], stderr=subprocess.PIPE, text=True
    )


def test_ranks_of_one_host(launched_program: Path, tmp_path: Path) -> None:
    port = free_port()
    child = start("--num_gpus", 2, "--master_port", port, launched_program, tmp_path, 'quoted "text"', "x=1")
    assert child.wait(timeout=120) == 0
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == f'{rank} 2 {rank} 2 0 1 {port}|quoted "text"|x=1'


def test_ranks_of_two_hosts_that_are_started_by_hand(launched_program: Path, tmp_path: Path) -> None:
    port = free_port()
    job = ["--num_nodes", 2, "--num_gpus", 1, "--master_addr", "127.0.0.1", "--master_port", port]
    children = [start(*job, "--node_rank", node, launched_program, tmp_path) for node in range(2)]
    assert [child.wait(timeout=180) for child in children] == [0, 0]
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == f"{rank} 2 0 1 {rank} 2 {port}|"


def test_the_first_failure_ends_all_and_is_shown_last(launched_program: Path, tmp_path: Path) -> None:
    child = start("--num_gpus", 2, "--master_port", free_port(), launched_program, tmp_path, "fail")
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 1
    assert "[rank 1] the reason\n" in errors
    assert errors.rstrip().endswith("[launch] rank 1 failed first (exit code 1):\nthe reason")


def test_programs_that_are_not_python_and_exit_codes(tmp_path: Path) -> None:
    script = tmp_path / "program.sh"
    script.write_text('#!/bin/sh\necho "$RANK $*" > "$1/$RANK"\nexit 7\n')
    script.chmod(0o755)
    child = start("--num-gpus", 1, "--no_python", "--master_port", free_port(), script, tmp_path, "b c")
    child.communicate(timeout=120)
    assert child.returncode == 7 and (tmp_path / "0").read_text() == f"0 {tmp_path} b c\n"


def test_signals_reach_the_ranks(launched_program: Path, tmp_path: Path) -> None:
    child = start("--num_gpus", 1, "--master_port", free_port(), launched_program, tmp_path, "wait")
    deadline = time.monotonic() + 60
    while not (tmp_path / "0").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM
