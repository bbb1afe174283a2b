"""Ranks whose process group has a back end of the stand-in's own: usage device_ranks_program.py PATH-OF-LIBRARY CASE.
Each prints what it found; no tensor travels."""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "stand_in"))

import stand_in
import torch
import torch.distributed as dist
from support import config, make

import tessera

DEVICE = "privateuseone"
NAME = "of_the_device"


def back_end(*args: Any) -> Any:
    return dist.ProcessGroupGloo(*args)


def found(call: Any) -> str:
    try:
        call()
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return f"device {torch.accelerator.current_device_index()}"


def of_local_rank() -> str:
    return found(lambda: tessera.init_distributed(NAME))


def late_on_one() -> str:
    time.sleep(1.5 * int(os.environ["RANK"]))
    return of_local_rank()


def chosen_by_the_program() -> str:
    torch.accelerator.set_device_index(3 - int(os.environ["RANK"]))
    return found(lambda: tessera.init_distributed(NAME))


def of_a_rank_beyond_the_devices() -> str:
    os.environ["LOCAL_RANK"] = str(99 * int(os.environ["RANK"]))
    torch.accelerator.set_device_index(1 - int(os.environ["RANK"]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        place = of_local_rank()
    return place + "".join(f"; {w.message}" for w in caught if "LOCAL_RANK" in str(w.message))


def shared() -> str:
    os.environ["LOCAL_RANK"] = "2"
    return found(lambda: tessera.init_distributed(NAME))


def shared_over_gloo() -> str:
    os.environ["LOCAL_RANK"] = "2"
    return found(lambda: tessera.init_distributed("gloo"))


def missing_on_one() -> str:
    if os.environ["RANK"] == "1":
        torch.accelerator.current_accelerator = lambda check_available=False: None
    return found(lambda: tessera.init_distributed(NAME))


def another_back_end_on_one() -> str:
    return found(lambda: tessera.init_distributed(NAME if os.environ["RANK"] == "0" else None))


def shared_in_a_group_of_the_program() -> str:
    dist.init_process_group(NAME)
    os.environ["LOCAL_RANK"] = "0"
    model = make()
    what = found(lambda: tessera.initialize(model=model, config=config(1)))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    return what


def shared_by_models() -> str:
    dist.init_process_group(NAME)
    return found(lambda: tessera.initialize(model=make().to(f"{DEVICE}:3"), config=config(3)))


def shared_by_zero_init() -> str:
    dist.init_process_group(NAME)
    os.environ["LOCAL_RANK"] = "0"
    return found(lambda: tessera.zero.Init(config=config(3)))


def no_kernels_on_one() -> str:
    dist.init_process_group(NAME)
    if os.environ["RANK"] == "1":
        library.tessera_stand_in_unusable(b"the driver is too old")
    return found(lambda: tessera.initialize(model=make(), config=config(1)))


def end_together() -> None:
    """A rank that ends while another one still connects to it is a failure there."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set(f"ended/{os.environ['RANK']}", "")
    store.wait([f"ended/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))])


if __name__ == "__main__":
    torch.set_num_threads(1)
    library = stand_in.load(sys.argv[1])
    dist.Backend.register_backend(NAME, back_end, devices=[DEVICE])
    started = time.monotonic()
    print(globals()[sys.argv[2]]())
    assert time.monotonic() - started < 30
    if dist.is_initialized():
        end_together()
        dist.destroy_process_group()
