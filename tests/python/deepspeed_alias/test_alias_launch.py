"""The command `deepspeed`: hostfiles and filters, hosts over ssh."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from deepspeed.launcher import runner
from support import free_port

from tessera import launch


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher puts them into its environment, which here is that of the tests."""
    for name in ("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is undone, too, where it was not there
        monkeypatch.delenv(name)


HOSTS = {"a": 4, "b": 2, "c": 1}


def test_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# comment\na slots=4\n\nb slots=2  # more\n  c   slots=1\n")
    assert runner.fetch_hostfile(str(file)) == HOSTS
    assert runner.fetch_hostfile(str(tmp_path / "none")) is None
    for wrong in ("a slots=4\na slots=4", "a slots=x", "a", "# nothing"):
        file.write_text(wrong)
        with pytest.raises(ValueError):
            runner.fetch_hostfile(str(file))


FILTERS = [
    ("", "", {"a": [0, 1, 2, 3], "b": [0, 1], "c": [0]}),
    ("b@a:0,2", "", {"a": [0, 2], "b": [0, 1]}),
    ("a:0-2", "", {"a": [0, 1, 2]}),
    ("", "a", {"b": [0, 1], "c": [0]}),
    ("", "a:1-3@c:0", {"a": [0], "b": [0, 1]}),
]


@pytest.mark.parametrize(("include", "exclude", "expected"), FILTERS)
def test_filters(include: str, exclude: str, expected: dict[str, list[int]]) -> None:
    found = runner.parse_inclusion_exclusion(HOSTS, include, exclude)
    assert found == expected and list(found) == list(expected)


@pytest.mark.parametrize(("include", "exclude"), [("a", "b"), ("x", ""), ("", "a:4"), ("a:x", ""), ("", "a@b@c")])
def test_filters_that_make_no_sense(include: str, exclude: str) -> None:
    with pytest.raises(ValueError):
        runner.parse_inclusion_exclusion(HOSTS, include, exclude)


# Arguments, and what the error says.
REFUSED = [
    (["--include", "a", "--num_gpus", "2"], "cannot be used with"),
    (["--launcher", "slurm"], "not served: --launcher slurm"),
    (["--autotuning", "run"], "not served: --autotuning"),
    (["--elastic_training"], "not served: --elastic_training"),
    (["--min_elastic_nodes", "1"], "not served: --min_elastic_nodes"),
    (["--max_elastic_nodes", "2"], "not served: --max_elastic_nodes"),
    (["--bind_cores_to_rank"], "not served: --bind_cores_to_rank"),
    (["--bind_core_list", "0-3"], "not served: --bind_core_list"),
    (["--module", "--no_python"], "exclude each other"),
    (["--node_rank", "1"], "needs --no_ssh"),
    (["--num_nodes", "2"], "needs a hostfile"),
    (["--no_ssh", "--num_nodes", "2", "--node_rank", "0"], "needs --master_addr"),
    (["--no_ssh", "--num_nodes", "2", "--node_rank", "2", "--master_addr", "a"], "--node_rank 0 to 1, got 2"),
    (["--no_ssh", "--num_nodes", "2", "--master_addr", "a"], "--node_rank 0 to 1, got -1"),
    (["--venv_script", "no/such/file", "--num_gpus", "1"], "failed"),
]


@pytest.mark.parametrize(("arguments", "says"), REFUSED)
def test_what_is_refused(arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert runner.main([*arguments, "--hostfile", "", "program.py"]) == 1
    assert says in capfd.readouterr().err


ONE, TWO = "localhost slots=4", "a slots=4\nb slots=2"
# Hostfile, arguments: slots of this host's ranks, whether these are devices, hosts, this host's number, where rank 0 is
ROUTES = [
    ("", ["--num_gpus", "2"], ([0, 1], False, 1, 0, "")),
    ("", [], ([0, 1, 2, 3], False, 1, 0, "")),
    ("", ["--include", "localhost:2,3"], ([2, 3], True, 1, 0, "")),
    ("", ["--exclude", "localhost:0"], ([1, 2, 3], True, 1, 0, "")),
    (ONE, ["--include", "localhost:2,3"], ([2, 3], True, 1, 0, "")),
    (ONE, ["--num_gpus", "5"], ([0, 1, 2, 3, 4], True, 1, 0, "")),
    (TWO, ["--exclude", "a"], ([0, 1], True, 1, 0, "")),
    (TWO, ["--num_nodes", "1"], ([0, 1, 2, 3], True, 1, 0, "")),
    (TWO, ["--no_ssh", "--node_rank", "1"], ([0, 1], True, 2, 1, "a")),
    (TWO, ["--no_ssh", "--node_rank", "0", "--num_gpus", "1", "--master_addr", "x"], ([0], True, 2, 0, "x")),
    (TWO, ["--no_ssh", "--node_rank", "1", "--include", "a:1@b:1", "--force_multi"], ([1], True, 2, 1, "a")),
    ("", ["--no_ssh", "--num_nodes", "3", "--node_rank", "2", "--master_addr", "x"], ([0, 1, 2, 3], False, 3, 2, "x")),
]


@pytest.mark.parametrize(("hosts", "arguments", "expected"), ROUTES)
def test_which_ranks_a_host_starts(
    hosts: str, arguments: list[str], expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text(hosts)
    found = []

    def run_here(options: Any, slots: list[int], named: bool, nodes: int, node: int) -> int:
        found.append((slots, named, nodes, node, options.master_addr))
        assert options.with_local_rank and ("CUDA_VISIBLE_DEVICES" in os.environ) == (not (named and not hosts))
        return 0

    monkeypatch.setattr(launch, "run_here", run_here)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(launch, "own_devices", lambda: 4)
    file = str(tmp_path / "hosts") if hosts else ""
    assert runner.main(["-H", file, *arguments, "program.py"]) == 0
    assert found == [expected]


def test_a_file_of_the_pid_is_no_one_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may write into the folder for temporary files, and know the name."""
    victim, file = tmp_path / "victim", tmp_path / f"{os.getpid()}.deepspeed"
    victim.write_text("precious")
    file.symlink_to(victim)

    def run_here(*_: Any) -> int:
        assert file.read_text() == str(os.getpid()) and not file.is_symlink() and file.stat().st_mode & 0o777 == 0o600
        return 0

    monkeypatch.setattr(launch, "run_here", run_here)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert runner.main(["-H", "", "--num_gpus", "1", "--save_pid", "program.py"]) == 0
    assert victim.read_text() == "precious" and not file.is_symlink() and not file.exists()


# What a launcher over ssh does itself, once for all hosts; all else reaches the hosts.
OWN = (
    "hostfile include exclude num_nodes num_gpus num_accelerators nproc_per_node master_addr node_rank no_ssh "
    "no_ssh_check force_multi save_pid ssh_port venv_script launcher launcher_args no_local_rank help"
)
PASSED = {
    "master_port": ["--master_port", "123"],
    "module": ["--module"],
    "no_python": ["--no_python"],
    "with_local_rank": ["--with_local_rank"],
    "quiet": ["-q"],
    "log_level": ["--log_level", "debug"],
    "enable_each_rank_log": ["--enable_each_rank_log", "some logs"],
    "log_dir": ["--log_dir", "some logs"],  # the same
}
NOTING = """#!/bin/sh
# Runs nothing: notes what the hosts get, the exports and the command.
folder=$(dirname "$0")
case "$*" in
*mktemp*) cat > "$folder/exports of $1"; echo /it/env ;;
*) echo "$3" > "$folder/command of $2" ;;
esac
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `deepspeed` for hosts a (2 slots) and b (1): what ssh was given for b, as (exports, command)."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(NOTING)
    ssh.chmod(0o755)
    (tmp_path / "hosts").write_text("a slots=2\nb slots=1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")

    def run(*arguments: str) -> tuple[str, str]:
        assert runner.main(["-H", "hosts", "--no_ssh_check", *arguments]) == 0
        return ((ssh.parent / f"{what} of b").read_text() for what in ("exports", "command"))  # type: ignore[return-value]

    return run


@pytest.mark.parametrize("name", PASSED)
def test_every_option_reaches_the_hosts_or_is_refused(
    name: str, asked: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        runner.main(["--help"])
    known = {word.replace("-", "_") for word in re.findall(r"(?<=--)[a-z][\w-]*", capfd.readouterr().out)}
    assert known - {"local_rank"} == {*OWN.split(), *PASSED}
    _, command = asked(*PASSED[name], "program.py", "--module", "it's")
    found: list[Any] = []
    monkeypatch.setattr(launch, "run_here", lambda *given: found.append(given))
    monkeypatch.setattr(sys, "argv", ["tessera launch", *shlex.split(command.rpartition(" && ")[2])[3:]])
    launch.main()
    (options, slots, named, nodes, node) = found[0]
    values = {"master_port": 123, "log_level": "debug", "enable_each_rank_log": "some logs", "log_dir": "some logs"}
    assert getattr(options, {"log_dir": "enable_each_rank_log"}.get(name, name)) == values.get(name, True)
    assert (slots, named, nodes, node, options.master_addr) == ([0], False, 2, 1, "a")
    assert options.program == "program.py" and options.arguments == ["--module", "it's"]


def start(*command: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "deepspeed.launcher.runner", *map(str, command)], stderr=subprocess.PIPE, text=True
    )


def test_devices_scripts_logs_and_levels(
    launched_program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a hostfile that has one host left."""
    (tmp_path / "hosts").write_text("a slots=4\nb slots=2\n")
    (tmp_path / "script.sh").write_text("echo noise\nexport OF_SCRIPT='a b'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    options = ["--exclude", "a@b:0", "--master_port", free_port(), "--enable_each_rank_log", "logs", "--save_pid"]
    child = start(
        "-H", "hosts", *options, "--venv_script", "script.sh", "--log_level", "info", launched_program, ".", "visible"
    )
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 0 and "torch/distributed/elastic" in errors
    assert (tmp_path / "0").read_text().startswith("0 1 0 1 0 1 ")
    assert [file.read_text() for file in tmp_path.glob("logs/**/0/stdout.log")] == ["devices 1 a b\n"]
    assert not (Path(tempfile.gettempdir()) / f"{child.pid}.deepspeed").exists()


SSH = """#!/bin/sh
# A host of its own: drop the options and the name, run the rest here, in an environment of its own.
echo "$@" >> "$(dirname "$0")/command lines"
while [ "${1#-}" != "$1" ]; do [ "$1" = -p ] && shift; shift; done
[ "$1" = refused ] && exit 255
shift
exec env -i PATH="$PATH" TMPDIR="$(dirname "$0")/tmp" sh -c "$*"
"""


@pytest.mark.long
def test_hosts_over_ssh(launched_program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    (folder / "tmp").mkdir(parents=True)
    (folder / "ssh").write_text(SSH)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("SECRET=it's hidden\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 slots=2\nlocalhost slots=1\n")
    port = free_port()
    more = ["--ssh_port", 22, "--enable_each_rank_log", tmp_path / "logs"]
    child = start("-H", hosts, "--num_gpus", 1, "--master_port", port, *more, launched_program, tmp_path, "a b")
    assert child.wait(timeout=180) == 0
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == f"{rank} 2 0 1 {rank} 2 {port} 1 {rank} 2|a b|--local_rank=0"
    assert [file.read_text() for file in tmp_path.glob("logs/**/stdout.log")] == ["secret it's hidden\n"] * 2
    # Every user of both hosts sees command lines; no file stays.
    assert "hidden" not in (folder / "command lines").read_text()
    assert not list((folder / "tmp").iterdir())
    child = start(
        "-H",
        hosts,
        "--num_gpus",
        1,
        "--no_ssh_check",
        "--master_port",
        free_port(),
        launched_program,
        tmp_path,
        "seven",
    )
    child.communicate(timeout=180)
    assert child.returncode == 7
    # Nor where a host does not come so far, or another one cannot be reached.
    many = ["-H", hosts, "--num_gpus", 1, "--no_ssh_check"]
    child = start(*many, "--venv_script", tmp_path / "none", launched_program, tmp_path, "a b")
    assert child.wait(timeout=60) != 0
    hosts.write_text("127.0.0.1 slots=2\nrefused slots=1\n")
    child = start(*many, launched_program, tmp_path, "a b")
    _, errors = child.communicate(timeout=60)
    assert child.returncode != 0 and "ssh refused could not write a file" in errors
    assert not list((folder / "tmp").iterdir())


def test_what_other_hosts_get(asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / ".deepspeed_env").write_text("SPECIAL = from the file\nnot a line\n# no=comment\n")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("PYTHONPATH", "/own")
    exports, command = asked("--venv_script", "env.sh", "p.py")
    for part in ("SPECIAL='from the file'", "NCCL_DEBUG=INFO", f"PYTHONPATH={tmp_path}:/own", "CUDA_VISIBLE_DEVICES=0"):
        assert f"export {part}" in exports.splitlines()
    assert "not a line" not in exports and "comment" not in exports
    assert f". {tmp_path}/env.sh && . /it/env && rm -f /it/env && " in command
    assert "NCCL" not in command and "SPECIAL" not in command
