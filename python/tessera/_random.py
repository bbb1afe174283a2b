"""The random generators of this process: torch's, Python's, numpy's and the device's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        states["device"] = module.get_rng_state()
    return states


def put_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        import numpy

        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    if "device" in states and torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(states["device"])


@contextmanager
def aside(begin: torch.Tensor | None = None) -> Iterator[None]:
    """What is drawn inside leaves the generators as they were. `begin`: where torch's begins."""
    states = random_states()
    try:
        if begin is not None:
            torch.set_rng_state(begin)
        yield
    finally:
        put_random_states(states)
