"""The random generators of this process: torch's, Python's, numpy's and the device's."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def random_states(of_device: bool = True) -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    if of_device and (device := _device()) is not None:
        states["device"] = device.get_rng_state()
    return states


def _device() -> Any:
    """The module of torch for the accelerator of this machine."""
    here = torch.accelerator.is_available()
    return torch.get_device_module(torch.accelerator.current_accelerator()) if here else None


def try_random_states(states: dict[str, Any]) -> None:
    """Raises where the generators do not take the states. The generators stay as they are."""
    begin = states.get("pass", {})
    if isinstance(begin, torch.Tensor):
        begin = {"torch": begin}
    if begin:
        try_random_states({key: value for key, value in begin.items() if key != "pass"})
    for state in [states["torch"], *states.get("generators", [])]:
        torch.Generator().set_state(state)
    if "python" in states:  # not of a program in C++
        random.Random().setstate(states["python"])
    if "numpy" in states and (numpy := _numpy()) is not None:
        of, keys, *rest = states["numpy"]
        numpy.random.RandomState().set_state((of, keys.numpy().astype("uint32"), *rest))
    if "device" in states:
        _try_on_device(states["device"])


def _numpy() -> Any:
    """None where it is not installed: then nothing draws from its generator."""
    try:
        return importlib.import_module("numpy")
    except ModuleNotFoundError:
        return None


def _try_on_device(state: Any) -> None:
    if not isinstance(state, torch.Tensor):
        raise TypeError(f"a {type(state).__name__} in the place of the device's")
    if (device := _device()) is not None:
        now = device.get_rng_state()
        try:
            device.set_rng_state(state)
        finally:
            device.set_rng_state(now)


def put_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states and (numpy := _numpy()) is not None:
        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    if "device" in states and (device := _device()) is not None:
        device.set_rng_state(states["device"])


@contextmanager
def aside(begin: Any = None) -> Iterator[None]:
    """Leaves the generators as they were, whatever is drawn inside. `begin`: random_states() to begin with, or
    torch's."""
    states = random_states()
    try:
        if begin is not None:
            put_random_states(begin if isinstance(begin, dict) else {"torch": begin})
        yield
    finally:
        put_random_states(states)
