"""Weights that several stages hold: equal at the start, their gradients summed before every step, counted once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from tessera import _core
from tessera.errors import UsageError
from tessera.pipeline._checks import rounds_at_random
from tessera.pipeline._grid import Grid
from tessera.pipeline._module import PipelineModule

if TYPE_CHECKING:
    from tessera.pipeline._engine import PipelineEngine


class Ties:
    """The tied modules of `model` that are on several stages. Collective over all processes."""

    def __init__(self, model: PipelineModule, grid: Grid) -> None:
        self._grid = grid
        self._tied: list[tuple[str, nn.Parameter, dist.ProcessGroup, int]] = []  # name, parameter, group, first stage
        self._in_place: dict[str, bool] = {}
        for key, stages in model.tied_stages().items():
            if len(stages) == 1:
                continue
            rows = [[stage * grid.size + place for stage in stages] for place in range(grid.size)]
            group = grid.new_group(rows)
            if group is None:
                continue
            for name, param in model.tied_modules[key].named_parameters():
                self._tied.append((f"tied_modules.{key}.{name}", param, group, stages[0]))

    def check(self, config: _core.Config) -> None:
        if self._tied and rounds_at_random(config):
            raise NotImplementedError(
                "[pipeline] tied weights on several stages do not stay equal where updates round at random: set "
                '"tessera": {"rounding": "nearest"}, or leave bf16_master_weights_and_grads and bf16_optimizer_states'
            )

    def share_values(self) -> None:
        """All copies start with the values of the first stage's."""
        for _, param, group, first in self._tied:
            values = param.detach().contiguous()
            dist.broadcast(values, first * self._grid.size + self._grid.place, group)
            with torch.no_grad():
                param.copy_(values)

    @property
    def copies(self) -> list[nn.Parameter]:
        """The parameters of this stage that an earlier one has, too."""
        return [param for _, param, _, first in self._tied if first != self._grid.stage]

    def attach(self, engine: PipelineEngine) -> None:
        """Where the copies lie in `engine`, once it is built. In every place of the stages they must be the same
        elements, or they are summed as a whole: units may lie otherwise on another stage. Collective."""
        mine = {
            name: engine.core.local_range(engine._index[id(param)])
            for name, param, *_ in self._tied
            if engine._optimizes(param)
        }
        everyone = [(self._grid.place, mine)]
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyone = [(0, {})] * dist.get_world_size()
            dist.all_gather_object(everyone, (self._grid.place, mine))
        parts: dict[str, dict[int, set[Any]]] = {}
        for place, ranges in everyone:
            for name, part in ranges.items():
                parts.setdefault(name, {}).setdefault(place, set()).add(part)
        self._in_place = {name: all(len(part) == 1 for part in places.values()) for name, places in parts.items()}

    def check_gradients(self, engine: PipelineEngine) -> None:
        """UsageError for a copy that the batch did not use: the others could not tell."""
        for name, param, _, _ in self._tied:
            if not engine._optimizes(param):
                continue
            if engine.core.local_view(engine._index[id(param)], _core.Quantity.Gradient) is None:
                raise UsageError(
                    f"[pipeline] '{name}' has no gradient on stage {self._grid.stage}: its layer there was not used "
                    "in this batch; a tied layer must be used in every place of the list"
                )

    def sum_gradients(self, engine: PipelineEngine) -> None:
        """Every copy's gradient becomes the sum of all copies'."""
        for name, param, group, _ in self._tied:
            if not engine._optimizes(param):
                continue
            number = engine._index[id(param)]
            if self._in_place[name]:
                own = engine.core.local_view(number, _core.Quantity.Gradient)
                assert own is not None
                total = own.detach().float().contiguous()
                dist.all_reduce(total, group=group)
                own.detach().copy_(total)
            else:
                whole = engine.core.get_full(number, _core.Quantity.Gradient)
                assert whole is not None
                total = whole.float().contiguous()
                dist.all_reduce(total, group=group)
                engine.core.set_full(number, _core.Quantity.Gradient, total)
