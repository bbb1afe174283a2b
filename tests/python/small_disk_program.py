"""Saves on a disk that is too small: usage small_disk_program.py FOLDER, a folder of a small file system, or
small_disk_program.py FOLDER BYTES, where no file may have more bytes. A program of its own: these belong to a
process."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import batch, config, engines, make, weights
from torch import nn

import tessera


class Wide(nn.Module):
    """About 4 MB of states on each of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 80_000), nn.Linear(80_000, 3)

    def forward(self, x: Any, y: Any) -> Any:
        return (self.second(self.first(x)) - y).square().mean()


def step(engine: Any, rank: int, number: int) -> None:
    engine(*batch(10 * rank + number)).backward()
    engine.step()


def body(engine: Any, rank: int, folder: Path, limit: int) -> None:
    step(engine, rank, 0)
    engine.save_checkpoint(folder)
    saved = weights(engine.module)
    step(engine, rank, 1)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for asynchronous in (False, True):
        start = time.monotonic()
        with pytest.raises(tessera.errors.IoError, match=r"No space left|File too large"):
            for tag in ("b", "c", "d"):
                engine.save_checkpoint(folder, tag, asynchronous=asynchronous)
                engine.wait_for_checkpoint()
        assert time.monotonic() - start < 30
    with pytest.raises(tessera.errors.IoError, match=r"No space left|File too large"):
        for number in range(9):
            engine.save_16bit_model(folder / str(number), "model.safetensors")
    with pytest.raises(tessera.errors.IoError, match=r"pytorch_model\.bin"):
        for number in range(9):
            engine.save_16bit_model(folder / f"bin{number}")
    step(engine, rank, 2)
    engine.load_checkpoint(folder, "global_step1")
    assert all((value == weights(engine.module)[name]).all() for name, value in saved.items())
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def main() -> None:
    folder, limit = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    cfg = config(2, optimizer={"type": "AdamW", "params": {"lr": 0.01}})
    engines(make(Wide), 2, cfg, lambda engine, rank: body(engine, rank, folder, limit))
    assert not list(folder.glob("**/*.part"))
    print("well")


if __name__ == "__main__":
    main()
