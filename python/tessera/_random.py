"""The random generators of this process (torch's, Python's, numpy's and the device's), and those that objects have for
themselves."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
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
    torch.Generator().set_state(states["torch"])
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


# ---------------------------------------------------------------- of objects


def own_generators(roots: Iterable[object], inside: Callable[[object], bool]) -> list[Any]:
    """The generators that attributes of `roots`, and of objects there that are `inside`, name: torch's on the CPU,
    random.Random, numpy's. Each once, in the order of roots and of names; without those of the process."""
    found: list[Any] = []
    seen = {id(generator) for generator in _of_process()}

    def look(value: object, is_root: bool = False) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if _kind(value) is not None:
            found.append(value)
            return
        if is_root or inside(value):
            for _, held in sorted(_attributes(value).items()):
                look(held)
        if isinstance(value, (list, tuple, dict)) and value:
            items = list(value.values()) if isinstance(value, dict) else value
            if inside(items[0]) or _kind(items[0]) is not None:  # else these are samples, perhaps millions
                for held in items:
                    look(held)

    for root in roots:
        look(root, is_root=True)
    return found


def _of_process() -> list[object]:
    methods = [random.getstate] + ([sys.modules["numpy"].random.get_state] if "numpy" in sys.modules else [])
    return [torch.default_generator, *(getattr(method, "__self__", None) for method in methods)]


def _attributes(value: object) -> dict[str, object]:
    of_class = {name: held for cls in type(value).__mro__ for name, held in vars(cls).items() if _kind(held)}
    return of_class | getattr(value, "__dict__", {})


def states_of(generators: Iterable[Any]) -> list[Any]:
    """Plain data: of torch's a tensor, of others a dict whose one key is the kind."""
    return [_state(generator) for generator in generators]


def put_states(generators: Iterable[Any], states: Iterable[Any]) -> None:
    """Raises for a state of another kind, or a damaged one."""
    for generator, state in zip(generators, states, strict=True):
        _put(generator, state)


def _kind(value: object) -> str | None:
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        return "torch" if value.device.type == "cpu" else None
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else "python"
    if numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
        return "numpy" if isinstance(value, numpy.random.Generator) else "numpy.RandomState"
    return None


def _state(generator: Any) -> Any:
    kind = _kind(generator)
    if kind == "torch":
        return generator.get_state()
    if kind == "python":
        return {kind: generator.getstate()}
    return {kind: _plain(generator.bit_generator.state if kind == "numpy" else generator.get_state(legacy=False))}


def _put(generator: Any, state: Any) -> None:
    kind = _kind(generator)
    if kind == "torch":
        generator.set_state(state)
    elif kind == "python":
        generator.setstate(state[kind])
    elif kind == "numpy":
        generator.bit_generator.state = state[kind]
    else:
        generator.set_state(state[kind])


def _plain(value: Any) -> Any:
    """Arrays of numpy as lists, its numbers as Python's."""
    if isinstance(value, dict):
        return {key: _plain(held) for key, held in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
