"""How an engine runs optimizers of whole parameters (optim/_whole.py) on slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tessera import _core
from tessera.optim._runners import ExternalRunner
from tessera.optim._states import OwnStates
from tessera.optim._whole import WholeOptimizer, squares

_STATES = [_core.Axis.DpShard, _core.Axis.Sp]


class EngineShards:
    """The slices of one engine."""

    def __init__(self, core: _core.Engine, numbers: Mapping[int, int], cut: bool) -> None:
        """`numbers`: id of a slice -> number of its parameter. `cut`: slices lie on several ranks."""
        self._core = core
        self._numbers = dict(numbers)
        self._group = core.mesh().group(_STATES) if cut else None

    def add(self, param: torch.Tensor, number: int) -> None:
        self._numbers[id(param)] = number

    def whole(self, param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        number = self._numbers[id(param)]
        if list(part.shape) == self._core.param(number).whole_sizes:
            return part
        return self._core.gather_full(number, part)

    def mine(self, param: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        return self._core.local_part(self._numbers[id(param)], full)

    def norms(self, values: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        # Slices of a model (tensor parallelism) may hold an element twice: of those the whole counts.
        sliced = [self._is_model_slice(param) for param, _ in values]
        found = [
            squares(self.whole(param, value)) if alone else squares(value)
            for (param, value), alone in zip(values, sliced, strict=True)
        ]
        sums = torch.stack(found)
        if self._group is None:
            return sums.sqrt()
        rows = sums.new_empty(self._group.size * len(values))
        self._group.all_gather(rows, sums, "norms of parameters")
        total = rows.view(self._group.size, -1).sum(0)
        return torch.where(torch.tensor(sliced, device=sums.device), sums, total).sqrt()

    def _is_model_slice(self, param: torch.Tensor) -> bool:
        spec = self._core.param(self._numbers[id(param)])
        return spec.whole_sizes != list(torch.Tensor.size(spec.tensor))


class SlicesRunner(ExternalRunner):
    """Every rank updates a slice of every parameter, an empty one where it has none: all make the same calls."""

    base: WholeOptimizer

    def __init__(
        self, core: _core.Engine, base: WholeOptimizer, index: Mapping[int, int], on_params: bool, cut: bool
    ) -> None:
        own = [
            spec.name
            for spec in core.params()
            if spec.varies != _core.Axes([]) and list(spec.tensor.shape) == spec.whole_sizes
        ]
        if own and cut:
            raise NotImplementedError(
                f"[initialize] {type(base).__name__} needs whole parameters, and {', '.join(own)} differ between "
                "ranks: use an optimizer that updates element by element"
            )
        super().__init__(core, base, index, on_params)
        base.shards = EngineShards(core, {id(target): number for number, _, target in self._masters}, cut)
        self._masters_with_values = [entry for entry in self._masters if entry[2].numel() > 0]
        self.states = OwnStates(core, base, {number: target for number, _, target in self._masters_with_values})

    @property
    def targets(self) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        return self._masters_with_values

    def _target(self, param: torch.Tensor, index: Mapping[int, int]) -> Any:
        target = super()._target(param, index)
        number = index.get(id(param))
        if target is None and number is not None:
            target = torch.empty(0, device=param.device).requires_grad_(True)
            self._masters.append((number, param, target))
        return target

    def _took(self, number: int, param: torch.Tensor, target: torch.Tensor) -> None:
        assert isinstance(self.base.shards, EngineShards)
        self.base.shards.add(target, number)
        if target.numel() > 0:
            self._masters_with_values.append((number, param, target))
            super()._took(number, param, target)

    def release(self, cut: bool, whole: Mapping[int, dict[str, Any]]) -> None:
        del self.base.shards
        super().release(cut, whole)
