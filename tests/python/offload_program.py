"""States on a disk in a program of its own, because limits and peaks belong to a process: usage

offload_program.py full FOLDER             the disk fills up in a step, by a limit on the size of files
offload_program.py shm                     a file system in memory
offload_program.py endless FOLDER          trains until it is killed
offload_program.py memory FOLDER ELEMENTS  prints by how many bytes the peak of resident memory grows while an engine is
                                           built, and while it trains
offload_program.py parameters FOLDER ELEMENTS  the same with parameters on the disk, too, where the model is built, and
                                           without gradients
"""

from __future__ import annotations

import gc
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support import batch, config, engines, make, run, weights
from torch import nn

import tessera


def away(folder: Path | str, stage: int = 2, **more: Any) -> dict[str, Any]:
    cfg = config(stage, optimizer={"type": "AdamW", "params": {"lr": 0.01}}, **more)
    cfg["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": str(folder)}
    return cfg


def full(folder: Path) -> None:
    def body(engine: Any, rank: int) -> None:
        run(engine, rank, 1)
        engine.save_checkpoint(folder / "run")
        want = weights(engine.module)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        with pytest.raises(tessera.errors.IoError, match=r"File too large|rank \d of this engine"):
            run(engine, rank, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        with pytest.raises(tessera.errors.IoError, match="load a checkpoint"):
            run(engine, rank, 1)
        engine.load_checkpoint(folder / "run")
        run(engine, rank, 0)
        assert all(torch.equal(value, want[name]) for name, value in weights(engine.module).items())
        run(engine, rank, 1)

    engines(make(), 2, away(folder / "disk", bf16=True), body)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    with pytest.raises(tessera.errors.IoError, match="cannot reserve"):
        tessera.initialize(model=make(), config=away(folder / "disk"))
    print("well")


def shm() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        found = []
        for cfg in (away(folder), config(2, optimizer={"type": "AdamW", "params": {"lr": 0.01}})):
            engine = tessera.initialize(model=make(), config=cfg)[0]
            run(engine, 0, 3)
            found.append(weights(engine.module))
            engine.destroy()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    print("well")


def endless(folder: Path) -> None:
    engine = tessera.initialize(model=make(), config=away(folder))[0]
    run(engine, 0, 1)
    print("training", flush=True)
    while True:
        engine(*batch(0)).backward()
        engine.step()


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1 << 22))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


class Sum(nn.Module):
    """Of blocks, which the engine takes over one after the other; their activations are numbers."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(elements >> 22))

    def forward(self) -> torch.Tensor:
        x = torch.zeros(())
        for part in self.parts:
            x = part(x)
        return x


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def all_away(folder: Path) -> dict[str, Any]:
    cfg = away(folder, 3, tessera={"update_in_backward": True})
    disk = {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 0, "buffer_count": 1, "buffer_size": 1 << 22}
    cfg["zero_optimization"]["offload_param"] = disk
    return cfg


def memory(folder: Path, elements: int, parameters: bool = False) -> None:
    cfg = all_away(folder) if parameters else away(folder, gradient_clipping=1.0)

    def train(size: int) -> list[int]:
        before = resident("VmRSS:")
        Path("/proc/self/clear_refs").write_text("5")
        with tessera.zero.Init(config=cfg, enabled=parameters):
            model = Sum(size)
        engine = tessera.initialize(model=model, config=cfg)[0]
        peaks = [resident("VmHWM:") - before]
        Path("/proc/self/clear_refs").write_text("5")  # a new peak
        for _ in range(3):
            engine().backward()
            engine.step()
        peaks.append(resident("VmHWM:") - before)
        engine.destroy()
        return peaks

    train(1 << 22)  # what torch and the engine load when they first run
    gc.collect()
    print(*train(elements))


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, *arguments = sys.argv[1:]
    if command in ("memory", "parameters"):
        memory(Path(arguments[0]), int(arguments[1]), command == "parameters")
    else:
        {"full": full, "shm": shm, "endless": endless}[command](*map(Path, arguments))
