"""Random draws of models that are cut.

Note [Random draws]
  What all ranks of a tensor-parallel group hold alike must be drawn alike (the dropout of a residual stream), what each
  has a slice of must not (attention weights of different heads). A region that is cut begins with a column-parallel
  layer and ends with the next row-parallel one. Where it begins, a number is drawn from torch's default generator of
  the CPU, which has one state on all ranks; it and the rank seed the default generator of the device until the region
  ends, which puts the state from before back. So the draws are a function of the state at the region's start, and the
  replay of a checkpointed block draws the same again. Whether a generator is inside a region shows in its seed: a
  replay that stops early leaves no mark behind.

Note [Forwards that draw]
  Whether a model draws is seen, not guessed: by the states of the generators around a forward. The first one in
  training is taken for one that draws; where no rank's did, regions are left out from then on and ranks do not talk
  any more. Such a forward still begins with a seed that all know (they count), so should one draw after all, it draws
  alike; the ones after it have regions again, and still no talk, because what one rank sees must not make it wait for
  others. The seeds of a forward without regions are of a range of their own, by which a replay in a backward tells.
  That needs slices of one size, or ranks would not draw equally many numbers in them: models with other slices are
  taken for ones that draw. Ranks that are threads share torch's generator of the CPU, whose state says nothing of one
  of them: there only what modules say of themselves is known.
"""

from __future__ import annotations

import os
import socket
import zlib
from typing import Any

import torch
from torch import nn

from tessera import _core

_LARGEST = 2**62  # seeds are below it; those of forwards that should draw nothing are above
_GOLDEN = 0x9E3779B97F4A7C15


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


def _process() -> int:
    """Another number in each process."""
    return zlib.crc32(socket.gethostname().encode()) << 22 | os.getpid()


class Draws:
    def __init__(self, drops: bool = False) -> None:
        """`drops`: what has_draws() says."""
        self.on = True  # regions draw on their own
        self.uneven = False  # slices of some weight differ in size
        self._drops = drops
        self._seed: int | None = None  # of the region that this rank is in, or was in last
        self._outside: Any = None  # the generator's state before it
        self._decided = False  # whether forwards draw
        self._threads = False  # ranks share a process
        self._late = False  # forwards draw, which the first did not
        self._moved = False  # in the first forward something was drawn
        self._states: list[torch.Tensor] | None = None  # of the generators, as this class left them last
        self._before: list[torch.Tensor] = []  # of the generators, before a forward that may draw nothing
        self._next = 0  # seed of the next forward that should draw nothing

    # ---------------------------------------------------------------- forwards: Note [Forwards that draw]

    def begin(self, group: _core.Group, device: torch.device) -> None:
        """Must be called before a forward in training. Collective in the first one, and in forwards of models that
        draw."""
        if not self._decided:
            self._threads = len(set(_gather(_process(), group, device))) < group.size
            self._before = self._look_at(device)
            if not self._before:
                self._decided, self.on = True, self._drops
        if self.on and not self._late:
            self.agree(group, device)
            self._states = None if self._decided else self._look_at(device)
            return
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # generators are the graph's
        self._before = self._look_at(device)
        self._next = (self._next + _GOLDEN) % _LARGEST
        for generator in self._watched(device):
            generator.manual_seed(self._next + (0 if self._late else _LARGEST))

    def end(self, group: _core.Group, device: torch.device) -> None:
        """Must be called after a forward that went through, outside of regions. Collective after the first forward."""
        if not self._decided:
            self._note(device)
            drew = self._moved or self.uneven
            self._decided, self.on, self._states = True, any(_gather(int(drew), group, device)), None
            for generator, state in zip(self._watched(device), [] if self.on else self._before, strict=False):
                generator.set_state(state)
            self._before = []
        else:
            self.give_up(device)

    def give_up(self, device: torch.device) -> None:
        """Must be called after any forward, also one that threw."""
        before, self._before = self._before, []
        for generator, state in zip(self._watched(device), before if self._decided else [], strict=False):
            now = generator.get_state()
            self._late |= not now.equal(generator.manual_seed(self._next + _LARGEST).get_state())
            generator.set_state(state)
        self.on |= self._late

    def agree(self, group: _core.Group, device: torch.device) -> None:
        """Makes all ranks draw alike from here on, outside of regions: as the first rank would have.
        Collective."""
        number = torch.tensor([_number()], device=device)
        group.broadcast(number, 0, "seed of random draws")
        seed = self._next = int(number.item())
        for generator in (torch.default_generator, _generator(device)):
            if generator is not None:
                generator.manual_seed(seed)

    def _watched(self, device: torch.device) -> list[torch.Generator]:
        """Generators that only this rank draws from."""
        own = _generator(device) if device.type != "cpu" else None
        cpu = [] if self._threads else [torch.default_generator]
        return cpu if own is None else [*cpu, own]

    def _look_at(self, device: torch.device) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._watched(device)]

    def _note(self, device: torch.device) -> None:
        """Notes, until it is decided, whether others drew since the states were noted last."""
        if self._states is not None and not self._moved:
            pairs = zip(self._states, self._look_at(device), strict=True)
            self._moved = any(not before.equal(now) for before, now in pairs)

    # ---------------------------------------------------------------- regions

    def enter(self, rank: int, device: torch.device) -> None:
        generator = _generator(device)
        if generator is None or self._inside(generator) or generator.initial_seed() >= _LARGEST:
            return
        self._note(device)
        number = _number()
        self._outside = generator.get_state()
        self._seed = (number + (rank + 1) * _GOLDEN) % _LARGEST
        generator.manual_seed(self._seed)
        self._states = None if self._states is None else self._look_at(device)

    def leave(self, device: torch.device) -> None:
        generator = _generator(device)
        if generator is not None and self._inside(generator):
            self._note(device)
            generator.set_state(self._outside)
            self._states = None if self._states is None else self._look_at(device)

    def _inside(self, generator: torch.Generator) -> bool:
        return self._seed is not None and generator.initial_seed() == self._seed


def _gather(number: int, group: _core.Group, device: torch.device) -> list[int]:
    """Returns the numbers of all ranks. Collective."""
    numbers = torch.zeros(group.size, dtype=torch.int64, device=device)
    group.all_gather(numbers, torch.tensor([number], device=device), "whether ranks draw random numbers")
    return numbers.tolist()
