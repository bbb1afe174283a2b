"""Full and local values of what an optimizer keeps of a parameter, whoever keeps them: the core (its OptimizerStates),
or an optimizer that runs itself (OwnStates). A runner has one of the two.

Parameters go by their number in the core, states by their key as in torch's optimizer state. Values are fp32, full ones
in the shape of the parameter; one number for a parameter ("step") is a tensor without dimensions. get_full and set_full
are collective. ConfigError for a missing key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from tessera import _core

QUANTITIES = (_core.Quantity.State0, _core.Quantity.State1)  # the core's, in the order of its state names


class OptimizerStates(Protocol):
    def get_full(self, number: int, key: str) -> torch.Tensor | None:
        """Returns the whole value of a state; None before there is one."""

    def set_full(self, number: int, key: str, full: torch.Tensor) -> None: ...

    def get_local(self, number: int, key: str) -> torch.Tensor | None:
        """Returns the value of this rank's part; empty where the part is empty."""

    def set_local(self, number: int, key: str, part: torch.Tensor) -> None: ...


class OwnStates:
    """What an optimizer that runs itself keeps of the parameters, for engine/client_states.h: states for this rank's
    part of a parameter, and nothing where that is empty. `targets`: what it updates, by number, where there is a
    part."""

    def __init__(self, core: _core.Engine, base: torch.optim.Optimizer, targets: Mapping[int, torch.Tensor]) -> None:
        self._core = core
        self._base = base
        self._targets = dict(targets)

    def add(self, number: int, target: torch.Tensor) -> None:
        self._targets[number] = target

    def get_full(self, number: int, key: str) -> torch.Tensor | None:
        return self._values.get_full(number, key)

    def set_full(self, number: int, key: str, full: torch.Tensor) -> None:
        self._values.set_full(number, key, full)

    def get_local(self, number: int, key: str) -> torch.Tensor | None:
        return self._values.get_local(number, key)

    def set_local(self, number: int, key: str, part: torch.Tensor) -> None:
        self._values.set_local(number, key, part)

    @property
    def _values(self) -> _core.ClientStates:
        """Made for a call: kept here, it would be in a circle that the garbage collector does not see."""
        return _core.ClientStates(self._core, self)

    # ---- what the core asks for

    @property
    def name(self) -> str:
        return type(self._base).__name__

    def has_states(self) -> bool:
        return any(self.state(number) for number in self._targets)

    def state(self, number: int) -> dict[str, Any]:
        """The states of a parameter. Empty where this rank has no part of it, or there was no step."""
        target = self._targets.get(number)
        return {} if target is None or target not in self._base.state else self._base.state[target]

    def target(self, number: int) -> torch.Tensor:
        return self._targets[number]

    def write_state(self, number: int, key: str, part: torch.Tensor) -> None:
        state = self.state(number)
        value = state[key]
        if isinstance(value, torch.Tensor):
            value.copy_(part.detach().reshape(value.shape))
        else:
            state[key] = type(value)(part.item())
