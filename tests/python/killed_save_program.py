"""Two ranks, processes, save again and again; one of them is killed at a random moment of a save: usage
killed_save_program.py FOLDER MOMENTS. The other must end with an error soon, and the newest checkpoint be whole.
Processes are forks of this one, which has imported everything and started no thread."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # torch's optimizers import it, which takes longer than a save
from small_disk_program import Wide
from support import batch, config, free_port, make

import tessera
from tessera import checkpoints

ENDS_WITHIN = 60  # seconds


def save_for_ever(rank: int, port: int, transport: str, folder: Path, signs: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ["TESSERA_TRANSPORT"] = transport
    cfg = config(2, optimizer={"type": "AdamW", "params": {"lr": 0.01}})
    engine = tessera.initialize(model=make(Wide), config=cfg)[0]
    for number in range(10_000):
        engine(*batch(10 * rank + number)).backward()
        engine.step()
        engine.save_checkpoint(folder, f"tag{number % 3}", keep_last=2, asynchronous=number % 2 == 1)
        os.write(signs, b"s")


def child(work: object, *args: object) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work(*args)  # type: ignore[operator]
        os._exit(0)
    except BaseException as error:
        print(f"rank ends: {type(error).__name__}: {str(error)[:200]}", flush=True)
        os._exit(7)


def check(folder: Path) -> None:
    """The newest checkpoint has every byte, and an engine goes on from it."""
    torch.set_num_threads(1)
    checkpoints.open_checkpoint(folder).verify()
    engine = tessera.Engine(make(Wide, seed=3), config(0, optimizer={"type": "AdamW", "params": {"lr": 0.01}}))
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    engine(*batch(1)).backward()
    engine.step()
    engine.save_checkpoint(folder, "after")
    names = sorted(item.name for item in folder.iterdir())
    assert not [name for name in names if name.endswith(".part")], names
    assert len(list((folder / "after").iterdir())) == 5, "one file, the manifest and three blobs"


def moment(number: int, root: Path) -> None:
    folder = root / str(number)
    folder.mkdir()
    signs, sign = os.pipe()
    port, transport = free_port(), ("auto", "gloo")[number % 2]
    ranks = [child(save_for_ever, rank, port, transport, folder, sign) for rank in range(2)]
    for _ in range(4):  # each rank has saved twice
        os.read(signs, 1)
    time.sleep(random.random() * 0.2)
    victim = random.randrange(2)
    os.kill(ranks[victim], signal.SIGKILL)
    start = time.monotonic()
    while (ended := os.waitpid(ranks[1 - victim], os.WNOHANG))[0] == 0:
        if time.monotonic() - start > ENDS_WITHIN:
            os.kill(ranks[1 - victim], signal.SIGKILL)
            raise SystemExit(f"moment {number}: the other rank has not ended within {ENDS_WITHIN} s")
        time.sleep(0.05)
    os.waitpid(ranks[victim], 0)
    assert os.waitstatus_to_exitcode(ended[1]) == 7, f"it ended without an error: {ended}"
    assert os.waitstatus_to_exitcode(os.waitpid(child(check, folder), 0)[1]) == 0, f"moment {number}"
    print(f"moment {number}: rank {victim} killed, the other ended after {time.monotonic() - start:.1f} s", flush=True)


def main() -> None:
    random.seed(7)
    for number in range(int(sys.argv[2])):
        moment(number, Path(sys.argv[1]))
    print("well")


if __name__ == "__main__":
    main()
