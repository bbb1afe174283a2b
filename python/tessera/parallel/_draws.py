"""Random draws of models that are cut.

Note [Random draws]
  What all ranks of a tensor-parallel group hold alike must be drawn alike (the dropout of a residual stream), what each
  has a slice of must not (attention weights of different heads). A region that is cut begins with a column-parallel
  layer and ends with the next row-parallel one. Where it begins, a number is drawn from torch's default generator of
  the CPU, which has one state on all ranks; it and the rank seed the default generator of the device until the region
  ends, which puts the state from before back. So the draws are a function of the state at the region's start, and the
  replay of a checkpointed block draws the same again. Whether a generator is inside a region is told by its seed: a
  replay that stops early leaves no mark behind.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tessera import _core

_LARGEST = 2**62


def has_draws(model: nn.Module) -> bool:
    """A module of `model` is set to drop something."""
    return any(
        isinstance(value, float) and value > 0
        for module in model.modules()
        for name, value in vars(module).items()
        if "drop" in name or (name == "p" and "Drop" in type(module).__name__)
    )


def _generator(device: torch.device) -> torch.Generator | None:
    """The default one of `device`; None where its back end shows none."""
    if device.type == "cpu":
        return torch.default_generator
    generators: Any = getattr(torch.get_device_module(device), "default_generators", None)
    return None if not generators else generators[device.index or 0]


def _number() -> int:
    return int(torch.randint(_LARGEST, ()).item())


class Draws:
    def __init__(self) -> None:
        self._seed: int | None = None  # of the region that this rank is in, or was in last
        self._outside: Any = None  # the generator's state before it

    def agree(self, group: _core.Group, device: torch.device) -> None:
        """What is drawn from here on, outside of regions, is drawn alike on all ranks: as the first one would have.
        Collective."""
        number = torch.tensor([_number()], device=device)
        group.broadcast(number, 0, "seed of random draws")
        seed = int(number.item())
        for generator in (torch.default_generator, _generator(device)):
            if generator is not None:
                generator.manual_seed(seed)

    def enter(self, rank: int, device: torch.device) -> None:
        generator = _generator(device)
        if generator is None or self._inside(generator):
            return
        number = _number()
        self._outside = generator.get_state()
        self._seed = (number + (rank + 1) * 0x9E3779B97F4A7C15) % _LARGEST
        generator.manual_seed(self._seed)

    def leave(self, device: torch.device) -> None:
        generator = _generator(device)
        if generator is not None and self._inside(generator):
            generator.set_state(self._outside)

    def _inside(self, generator: torch.Generator) -> bool:
        return self._seed is not None and generator.initial_seed() == self._seed
