"""Starts programs in the environment that DeepSpeed is in."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from support import free_port

PEERS = os.environ.get("TESSERA_PEERS")
LIMIT = 600


def run_peer(folder: Path, program: str, world: int, *arguments: str, **more: str) -> None:
    """The program of this folder as `world` ranks on CPUs; what failed ranks have said is the error. `more`: of the
    environment."""
    shared = {
        "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **more,
    }  # fmt: skip
    ranks, outputs = [], []
    for rank in range(world):
        own = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        outputs.append(folder / f"output-{world}-{rank}.txt")
        with open(outputs[-1], "w") as output:
            command = [str(PEERS), program, *arguments]
            ranks.append(subprocess.Popen(command, cwd=Path(__file__).parent, env=own, stdout=output, stderr=output))
    for _ in range(LIMIT):  # seconds that are counted: a machine may stand still for minutes
        if all(process.poll() is not None for process in ranks):
            break
        time.sleep(1)
    for process in ranks:
        process.kill()
    codes = [process.wait() for process in ranks]  # -9: not done after LIMIT
    said = [f"rank {rank}: {code}\n{outputs[rank].read_text()[-6000:]}" for rank, code in enumerate(codes) if code != 0]
    assert not said, "\n".join(said)
