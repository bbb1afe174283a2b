"""Activation checkpointing: torch.utils.checkpoint, whose kept inputs may lie in host memory, or in slices on the ranks
that hold slices of the model; and random generators by name whose draws are the same in the recomputation.

Note [Inputs of a checkpoint]
  torch's checkpoint (use_reentrant=False) keeps the inputs of the function as saved tensors, and of what the function
  saves nothing. So hooks on saved tensors around it see the inputs, and nothing else: they move or cut them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tessera import _core

__all__ = ["Recompute"]


class RandomStates:
    """States of random generators by name; fork(name) draws from one of them in place of the device's own."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self.states: dict[str, torch.Tensor] = {}
        self.seeds: set[int] = set()

    def add(self, name: str, seed: int) -> None:
        """Adds a generator that begins with `seed`. ValueError for a name or a seed that is there already."""
        if seed in self.seeds:
            raise ValueError(f"[recompute] seed {seed} already exists")
        if name in self.states:
            raise ValueError(f"[recompute] rng state {name} already exists")
        self.seeds.add(seed)
        self.states[name] = torch.Generator(self.device).manual_seed(seed).get_state()

    def clear(self) -> None:
        self.states, self.seeds = {}, set()

    @contextlib.contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Lets the device's default generator go on from the state `name` inside the `with`; the state is
        then the one in which it ended."""
        if name not in self.states:
            raise ValueError(f"[recompute] rng state {name} is not added")
        before = self._state()
        self._set(self.states[name])
        try:
            yield
        finally:
            self.states[name] = self._state()
            self._set(before)

    @contextlib.contextmanager
    def replayed(self, states: dict[str, torch.Tensor]) -> Iterator[None]:
        """Replaces the states inside the `with`; afterwards they are what they were before."""
        before, self.states = self.states, dict(states)
        try:
            yield
        finally:
            self.states = before

    def _state(self) -> torch.Tensor:
        if self.device.type == "cpu":
            return torch.get_rng_state()
        return torch.get_device_module(self.device).get_rng_state(self.device)

    def _set(self, state: torch.Tensor) -> None:
        if self.device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(self.device).set_rng_state(state, self.device)


@dataclasses.dataclass
class Recompute:
    """Calls functions so that their backward computes again what it needs."""

    offload: bool = False  # inputs are kept in host memory
    slices: _core.Group | None = (
        None  # inputs, alike on these ranks, are kept in slices; their backwards are collective
    )
    synchronize: bool = False  # the device has done its work before and after each call
    named: bool = False  # a range in torch.profiler
    random: RandomStates | None = None

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """function(*args, **kwargs); what its backward needs is computed again there."""
        random = self.random
        states = dict(random.states) if random is not None else {}  # the states as the call finds them

        def contexts() -> tuple[Any, Any]:
            again = random.replayed(states) if random is not None else contextlib.nullcontext()
            return contextlib.nullcontext(), again

        self._settle()
        with contextlib.ExitStack() as stack:
            if self.offload:
                stack.enter_context(torch.autograd.graph.save_on_cpu())
            if self.slices is not None and self.slices.size > 1:
                stack.enter_context(_in_slices(self.slices))
            if self.named:
                stack.enter_context(torch.profiler.record_function("tessera::recompute"))
            result = checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        self._settle()
        return result

    def _settle(self) -> None:
        if self.synchronize and torch.accelerator.is_available():
            torch.accelerator.synchronize()


def _in_slices(group: _core.Group) -> Any:
    """Saved tensors are kept as this rank's part of the flattened values; reading them back is collective."""

    def cut(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, torch.nn.Parameter) or tensor.numel() < group.size:
            return tensor
        length = -(-tensor.numel() // group.size)
        flat = tensor.detach().reshape(-1)
        mine = flat.new_zeros(length)
        part = flat[group.rank * length : (group.rank + 1) * length]
        mine[: part.numel()] = part
        return mine, tensor.shape, tensor.numel()

    def join(kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        mine, shape, numel = kept
        whole = mine.new_empty(mine.numel() * group.size)
        group.all_gather(whole, mine, "inputs of a recomputation")
        return whole[:numel].view(shape)

    return torch.autograd.graph.saved_tensors_hooks(cut, join)
