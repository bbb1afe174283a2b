"""The client programs on one and two processes, and `accelerate launch` with its configuration file. Run by
`make test-clients` with the interpreter that has the clients; each line of a program is one path."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
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


def launch(command: list[str], **more: str) -> None:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=280, env=environment(**more)
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert done.returncode == 0, "\n".join(lines) + done.stderr[-4000:]
    assert any(line.endswith(": passed") for line in lines)


def shared_memory() -> set[str]:
    """Names in /dev/shm, without those that a running process uses: they are no leftovers."""
    used = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it ended, or is somebody else's
            used += maps.read_text()
    return {name for name in os.listdir("/dev/shm") if f"/dev/shm/{name}" not in used}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("program", PROGRAMS)
def test_runs_as_under_plain_pytorch(program: str, ranks: int) -> None:
    before = shared_memory()
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(HERE / f"{program}.py"),
    ]
    launch(command)
    assert not {name for name in shared_memory() - before if "tessera" in name or "torch" in name}


def test_accelerate_launch_with_a_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(ACCELERATE_CONFIG)
    command = ["-m", "accelerate.commands.launch", "--config_file", str(file), "--num_processes", "2"]
    launch([*command, str(HERE / "accelerate_loop.py")], TESSERA_CLIENTS_LAUNCHED="1")
