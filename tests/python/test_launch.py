"""tessera launch: hostfiles and filters, ranks of one host, exit codes, hosts over ssh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import free_port
from tessera.errors import ConfigError

from tessera import launch

HOSTS = {"a": 4, "b": 2, "c": 1}


def test_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# comment\na slots=4\n\nb slots=2  # more\n  c   slots=1\n")
    assert launch.fetch_hostfile(str(file)) == HOSTS
    assert launch.fetch_hostfile(str(tmp_path / "none")) is None
    for wrong in ("a slots=4\na slots=4", "a slots=x", "a", "# nothing"):
        file.write_text(wrong)
        with pytest.raises(ValueError):
            launch.fetch_hostfile(str(file))


FILTERS = [
    ("", "", {"a": [0, 1, 2, 3], "b": [0, 1], "c": [0]}),
    ("b@a:0,2", "", {"a": [0, 2], "b": [0, 1]}),
    ("a:0-2", "", {"a": [0, 1, 2]}),
    ("", "a", {"b": [0, 1], "c": [0]}),
    ("", "a:1-3@c:0", {"a": [0], "b": [0, 1]}),
]


@pytest.mark.parametrize(("include", "exclude", "expected"), FILTERS)
def test_filters(include: str, exclude: str, expected: dict[str, list[int]]) -> None:
    found = launch.parse_inclusion_exclusion(HOSTS, include, exclude)
    assert found == expected and list(found) == list(expected)


@pytest.mark.parametrize(("include", "exclude"), [("a", "b"), ("x", ""), ("", "a:4"), ("a:x", ""), ("", "a@b@c")])
def test_filters_that_make_no_sense(include: str, exclude: str) -> None:
    with pytest.raises(ConfigError):
        launch.parse_inclusion_exclusion(HOSTS, include, exclude)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--include", "a", "--num_gpus", "2"], ConfigError),
        (["--launcher", "slurm"], NotImplementedError),
        (["--autotuning", "run"], NotImplementedError),
        (["--hostfile", "", "--num_nodes", "2"], ConfigError),
    ],
)
def test_what_is_refused(arguments: list[str], error: type[Exception]) -> None:
    with pytest.raises(error):
        launch.main([*arguments, "program.py"])


PROGRAM = """
import os, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_PORT")
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write(" ".join(os.environ[name] for name in names) + "|" + "|".join(sys.argv[2:]))
if "fail" in sys.argv:
    if os.environ["RANK"] == "1":
        sys.exit("the reason")
    time.sleep(60)
if "seven" in sys.argv:
    os._exit(7)
if "wait" in sys.argv:
    time.sleep(60)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def start(*command: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tessera.launch", *map(str, command)], stderr=subprocess.PIPE, text=True
    )


def test_ranks_of_one_host(program: Path, tmp_path: Path) -> None:
    port = free_port()
    child = start("--num_gpus", 2, "--master_port", port, program, tmp_path, 'quoted "text"', "x=1")
    assert child.wait(timeout=120) == 0
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == f'{rank} 2 {rank} 2 0 1 {port}|quoted "text"|x=1'


def test_the_first_failure_ends_all_and_is_shown_last(program: Path, tmp_path: Path) -> None:
    child = start("--num_gpus", 2, "--master_port", free_port(), program, tmp_path, "fail")
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 1
    assert errors.rstrip().endswith("[launch] rank 1 failed first (exit code 1):\nthe reason")


def test_programs_that_are_not_python_and_exit_codes(tmp_path: Path) -> None:
    script = tmp_path / "program.sh"
    script.write_text('#!/bin/sh\necho "$RANK $*" > "$1/$RANK"\nexit 7\n')
    script.chmod(0o755)
    child = start("--num-gpus", 1, "--no_python", "--master_port", free_port(), script, tmp_path, "b c")
    child.communicate(timeout=120)
    assert child.returncode == 7 and (tmp_path / "0").read_text() == f"0 {tmp_path} b c\n"


def test_signals_reach_the_ranks(program: Path, tmp_path: Path) -> None:
    child = start("--num_gpus", 1, "--master_port", free_port(), program, tmp_path, "wait")
    deadline = time.monotonic() + 60
    while not (tmp_path / "0").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM


SSH = """#!/bin/sh
# A host of its own: drop the options and the name, run the rest here.
while [ "${1#-}" != "$1" ]; do [ "$1" = -p ] && shift; shift; done
shift
exec sh -c "$*"
"""


def test_hosts_over_ssh(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 slots=2\nlocalhost slots=1\n")
    port = free_port()
    child = start("-H", hosts, "--num_gpus", 1, "--master_port", port, "--ssh_port", 22, program, tmp_path, "a b")
    assert child.wait(timeout=180) == 0
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == f"{rank} 2 0 1 {rank} 2 {port}|a b"
    child = start(
        "-H", hosts, "--num_gpus", 1, "--no_ssh_check", "--master_port", free_port(), program, tmp_path, "seven"
    )
    child.communicate(timeout=180)
    assert child.returncode == 7


def test_what_other_hosts_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / ".deepspeed_env").write_text("SPECIAL=from the file\nnot a line\n")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    options = launch.parser("launch").parse_args(["--venv_script", "env.sh", "p.py", "it's"])
    command = launch.remote_command(options, {"a": [0, 1], "b": [2]}, 1)
    for part in ("export SPECIAL='from the file'", "export NCCL_DEBUG=INFO", ". env.sh", "CUDA_VISIBLE_DEVICES=2"):
        assert part in command
    assert "--node_rank 1 --num_nodes 2 --num_gpus 1" in command and "--master_addr a" in command
    assert "not a line" not in command
