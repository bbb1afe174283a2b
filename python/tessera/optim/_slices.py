"""How an engine runs optimizers of whole parameters (optim/_whole.py) on slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tessera import _core
from tessera.optim._runners import ExternalRunner
from tessera.optim._states import OwnStates
from tessera.optim._whole import WholeOptimizer


class SlicesRunner(ExternalRunner):
    """Every rank updates a slice of every parameter, an empty one where it has none: all make the same calls."""

    base: WholeOptimizer

    def __init__(self, core: _core.Engine, base: WholeOptimizer, index: Mapping[int, int], on_params: bool) -> None:
        shards = _core.shards_of(core, type(base).__name__)
        super().__init__(core, base, index, on_params)
        base.shards, self._numbers = shards, {id(target): number for number, _, target in self._masters}
        base.numbers = self._numbers
        self._masters_with_values = [entry for entry in self._masters if entry[2].numel() > 0]
        self.states = OwnStates(core, base, {number: target for number, _, target in self._masters_with_values})

    @property
    def targets(self) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """With those that this rank has no element of where it has states of them."""
        return [entry for entry in self._masters if entry[2].numel() > 0 or self.whole_states(entry[0])]

    def whole_states(self, number: int) -> frozenset[str]:
        return self.base.whole_states(self._core.param(number).whole_sizes)

    def _target(self, param: torch.Tensor, index: Mapping[int, int]) -> Any:
        number = index.get(id(param))
        brought = dict(self.base.state.get(param, {}))
        target = super()._target(param, index)
        if number is None:
            return target
        if target is None:
            target = torch.empty(0, device=param.device).requires_grad_(True)
            self._masters.append((number, param, target))
        if brought and (whole := self.whole_states(number)):
            self.base.state[target].update({key: brought[key] for key in ("step", *whole) if key in brought})
        return target

    def _took(self, number: int, param: torch.Tensor, target: torch.Tensor) -> None:
        self._numbers[id(target)] = number
        if target.numel() > 0:
            self._masters_with_values.append((number, param, target))
            super()._took(number, param, target)

    def release(self, cut: bool, whole: Mapping[int, dict[str, Any]]) -> None:
        del self.base.shards, self.base.numbers
        own = {
            n: dict(self.base.state[t]) for n, _, t in self._masters if self.whole_states(n) and t in self.base.state
        }
        super().release(cut, {**whole, **own})
