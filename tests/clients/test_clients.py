"""The client programs on one and two processes, and `accelerate launch` with its configuration file. Run by
`make test-clients` with the interpreter that has the clients; each line of a program is one path."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMIT = 280
PROGRAMS = ("accelerate_loop", "trainer", "fine_tuning", "lightning_loop", "tutorials")
ACCELERATE_CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 2
  gradient_clipping: 0.5
  zero_stage: 2
  zero3_init_flag: false
  offload_optimizer_device: none
  offload_param_device: none
mixed_precision: 'no'
num_machines: 1
machine_rank: 0
num_processes: 2
use_cpu: false
"""


def environment(**more: str) -> dict[str, str]:
    own = {"ACCELERATE_USE_DEEPSPEED": "true", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **own, **more}


def outputs(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Waits in seconds that are counted, not read off a clock: a machine that stands still for minutes, as loaded or
    virtual ones do, takes one of them."""
    for _ in range(LIMIT):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=1)
    os.killpg(process.pid, signal.SIGKILL)
    said, errors = process.communicate()
    raise AssertionError(f"no end after {LIMIT} s:\n{said[-4000:]}{errors[-4000:]}")


def launch(command: list[str], **more: str) -> None:
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**more),
        start_new_session=True,
    )
    said, errors = outputs(process)
    lines = [line for line in said.splitlines() if line.startswith("[")]
    assert process.returncode == 0, "\n".join(lines) + errors[-4000:]
    assert any(line.endswith(": passed") for line in lines)


def leftovers(before: set[str]) -> set[str]:
    """New names in /dev/shm that no running process uses. torch's manager takes off those of a process a while after
    its end, and other programs of this machine come and go: what is left is what stays."""
    found = {name for name in os.listdir("/dev/shm") if "tessera" in name or "torch" in name} - before
    deadline = time.monotonic() + 60
    while True:
        used = ""
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):  # it ended, or is somebody else's
                used += maps.read_text()
        found = {name for name in found & set(os.listdir("/dev/shm")) if f"/dev/shm/{name}" not in used}
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("program", PROGRAMS)
def test_runs_as_under_plain_pytorch(program: str, ranks: int) -> None:
    before = set(os.listdir("/dev/shm"))
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(HERE / f"{program}.py"),
    ]
    launch(command)
    assert not leftovers(before)


def test_ray_train() -> None:
    pytest.importorskip("ray", reason="Ray is not installed (requirements/ray.txt)")
    launch([str(HERE / "ray_train.py"), "2"], RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")


def test_accelerate_launch_with_a_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(ACCELERATE_CONFIG)
    command = ["-m", "accelerate.commands.launch", "--config_file", str(file), "--num_processes", "2"]
    command += ["--main_process_port", "0"]  # a free one; without it 29500, which others take too
    launch([*command, str(HERE / "accelerate_loop.py")], TESSERA_CLIENTS_LAUNCHED="1")
