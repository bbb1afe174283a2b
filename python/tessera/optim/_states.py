"""Full and local values of what an optimizer keeps of a parameter, whoever keeps them: the core (its OptimizerStates),
or an optimizer that runs itself (OwnStates). A runner has one of the two.

Parameters go by their number in the core, states by their key as in torch's optimizer state. Values are fp32, full ones
in the shape of the parameter; one number for a parameter ("step") is a tensor without dimensions. get_full and set_full
are collective. ConfigError for a missing key.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Protocol

import torch

from tessera import _core
from tessera.errors import ConfigError

QUANTITIES = (_core.Quantity.State0, _core.Quantity.State1)  # the core's, in the order of its state names


class OptimizerStates(Protocol):
    def get_full(self, number: int, key: str) -> torch.Tensor | None:
        """Returns the whole value of a state; None before there is one."""

    def set_full(self, number: int, key: str, full: torch.Tensor) -> None: ...

    def get_local(self, number: int, key: str) -> torch.Tensor | None:
        """Returns the value of this rank's part; empty where the part is empty."""

    def set_local(self, number: int, key: str, part: torch.Tensor) -> None: ...


class _Kind(IntEnum):
    """The kind of a rank's value for a key; the largest of all ranks is what the state is."""

    NOTHING = 0  # no part of the parameter, or no step yet
    NUMBER = 1  # one number for the whole parameter, such as "step"
    PART = 2  # a value for each element of this rank's part
    OTHER = 3  # such as Adafactor's rows and columns
    UNKNOWN = 4  # the rank has states, and none of this name


class OwnStates:
    """The optimizer keeps states for this rank's part of a parameter, and nothing where that is empty: what a state is
    has to be agreed upon before values are gathered. `targets`: what it updates, by number, where there is a part."""

    def __init__(self, core: _core.Engine, base: torch.optim.Optimizer, targets: Mapping[int, torch.Tensor]) -> None:
        self._core = core
        self._base = base
        self._targets = dict(targets)

    def add(self, number: int, target: torch.Tensor) -> None:
        self._targets[number] = target

    def get_full(self, number: int, key: str) -> torch.Tensor | None:
        value, kind = self._look(number, key)
        if kind == _Kind.NOTHING:
            return None
        if kind == _Kind.NUMBER:
            return torch.tensor(self._core.agree_max(-torch.inf if value is None else float(value)))
        return self._core.gather_full(number, torch.empty(0) if value is None else value.detach())

    def set_full(self, number: int, key: str, full: torch.Tensor) -> None:
        value, kind = self._look(number, key)
        if kind == _Kind.NOTHING:
            raise ConfigError(f"[state] {self._name} has no state {key!r} of this parameter yet: it makes it in a step")
        part = full if kind == _Kind.NUMBER else self._core.local_part(number, full)
        if value is not None:
            self._write(number, key, part)

    def get_local(self, number: int, key: str) -> torch.Tensor | None:
        state = self._of(number)
        kind = self._kind(number, state, key)
        if kind == _Kind.NOTHING:
            begin, end = self._core.local_range(number)
            made = any(self._of(other) for other in self._targets)
            return torch.empty(0) if begin == end and made else None
        self._refuse(kind, key, state)
        return torch.as_tensor(state[key]).detach().float()

    def set_local(self, number: int, key: str, part: torch.Tensor) -> None:
        state = self._of(number)
        kind = self._kind(number, state, key)
        self._refuse(kind, key, state)
        if kind == _Kind.NOTHING:
            if part.numel() > 0:
                raise ConfigError(f"[state] this rank has no state {key!r} of this parameter")
            return
        size = torch.as_tensor(state[key]).numel()
        if part.numel() != size:
            raise ConfigError(f"[state] state {key!r} has {size} values here, not {part.numel()}")
        self._write(number, key, part)

    @property
    def _name(self) -> str:
        return type(self._base).__name__

    def _of(self, number: int) -> dict[str, Any]:
        """The states of a parameter. Empty where this rank has no part of it, or there was no step."""
        target = self._targets.get(number)
        return {} if target is None or target not in self._base.state else self._base.state[target]

    def _look(self, number: int, key: str) -> tuple[Any, _Kind]:
        """This rank's value, and what the state is on all ranks alike."""
        state = self._of(number)
        kind = _Kind(int(self._core.agree_max(float(self._kind(number, state, key)))))
        self._refuse(kind, key, state)
        begin, end = self._core.local_range(number)
        if kind == _Kind.PART and self._core.agree_max(float(key not in state and begin < end)) > 0:
            raise ConfigError(f"[state] some ranks have no state {key!r} of their part of this parameter")
        return state.get(key), kind

    def _kind(self, number: int, state: dict[str, Any], key: str) -> _Kind:
        if not state:
            return _Kind.NOTHING
        if key not in state:
            return _Kind.UNKNOWN
        value = state[key]
        if isinstance(value, torch.Tensor) and value.shape == self._targets[number].shape:
            return _Kind.PART
        if isinstance(value, bool | int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0):
            return _Kind.NUMBER
        return _Kind.OTHER

    def _refuse(self, kind: _Kind, key: str, state: dict[str, Any]) -> None:
        if kind == _Kind.UNKNOWN:
            there = f"; there are {', '.join(map(str, state))}" if state else ""
            raise ConfigError(f"[state] {self._name} has no state {key!r} of this parameter{there}")
        if kind == _Kind.OTHER:
            raise ConfigError(
                f"[state] {self._name}'s state {key!r} is not one value for each element: read optimizer.state"
            )

    def _write(self, number: int, key: str, part: torch.Tensor) -> None:
        state = self._of(number)
        value = state[key]
        if isinstance(value, torch.Tensor):
            value.copy_(part.detach().reshape(value.shape))
        else:
            state[key] = type(value)(part.item())
