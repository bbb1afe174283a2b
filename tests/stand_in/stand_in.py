"""The stand-in accelerator in Python: `load(path)` gives torch's type "privateuseone" four devices. See stand_in.h."""

import ctypes
import itertools
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import torch


def load(path: str | Path) -> ctypes.CDLL:
    """Registers the devices of libtessera_privateuseone.so; the library, for its functions of stand_in.h."""
    torch.ops.load_library(str(path))
    library = ctypes.CDLL(str(path))
    for name in ("launches", "launches_of", "bytes"):
        getattr(library, f"tessera_stand_in_{name}").restype = ctypes.c_int64
    library.tessera_stand_in_races.restype = ctypes.c_char_p
    library.tessera_stand_in_fail_allocation.argtypes = (ctypes.c_int, ctypes.c_int64)
    library.tessera_stand_in_fail.argtypes = (ctypes.c_bool,)
    library.tessera_stand_in_capture.argtypes = (ctypes.c_bool,)
    if not hasattr(torch, "privateuseone"):
        # What torch's Python code asks of a device type; without the module it makes no tensor there.
        module = types.ModuleType("torch.privateuseone")
        module.is_available = lambda: True
        module.device_count = lambda: 4  # kDevices of memory.h
        module.current_device = lambda: torch.accelerator.current_device_index()
        module.set_device = torch.accelerator.set_device_index
        module.device = lambda device: torch.accelerator.device_index(torch.device(device).index)
        module.synchronize = torch.accelerator.synchronize
        module.get_device_properties = lambda device: types.SimpleNamespace(
            name="stand-in", uuid=f"stand-in {torch.device(device).index}"
        )
        module.manual_seed_all = lambda seed: None  # the CPU's generator serves
        module._is_in_bad_fork = lambda: False
        module.get_rng_state = lambda device=None: torch.get_rng_state()
        module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
        module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
        torch._register_device_module("privateuseone", module)
    return library


def each_allocation(library: ctypes.CDLL, body: Callable[[], object]) -> Iterator[Exception]:
    """What body() raises where the first allocation of device 0 fails, where the second one does, ... until none."""
    for number in itertools.count():
        library.tessera_stand_in_fail_allocation(0, number)
        try:
            body()
            return
        except Exception as raised:
            error = raised
        finally:
            library.tessera_stand_in_fail_allocation(0, -1)
        yield error


def races(library: ctypes.CDLL) -> list[str]:
    """What the race detector found since the last call."""
    return library.tessera_stand_in_races().decode().splitlines()
