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
        self._trained: set[str] = set()
        self._any = any(len(stages) > 1 for stages in model.tied_stages().values())  # on all ranks alike
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

    def follow(self, engine: PipelineEngine) -> None:
        """Before a batch: what was frozen or thawed since takes part, or does not. UsageError, on all ranks, where a
        copy is trained and another one is not. Collective."""
        if not self._any:
            return
        problem: Exception | None = None
        try:
            engine._join()
        except dist.DistBackendError:
            raise
        except Exception as error:
            problem = error
        rows = engine._over.rows([problem is not None, self._trained != self._trained_in(engine)])
        if rows[:, 0].any():
            engine._share_failure(problem)
        if rows[:, 1].any():
            self.attach(engine)

    def _trained_in(self, engine: PipelineEngine) -> set[str]:
        return {name for name, param, *_ in self._tied if engine._optimizes(param) and param.requires_grad}

    def attach(self, engine: PipelineEngine) -> None:
        """Where the copies lie in `engine`, once it is built. In every place of the stages they must be the same
        elements, or they are summed as a whole: units may lie otherwise on another stage. Collective."""
        here = self._trained_in(engine)
        mine = {
            name: engine.core.local_range(engine._index[id(param)]) if name in here else None
            for name, param, *_ in self._tied
        }
        parts: dict[str, dict[int, set[Any]]] = {}
        for place, ranges in engine._of_all((self._grid.place, mine)):
            for name, part in ranges.items():
                parts.setdefault(name, {}).setdefault(place, set()).add(part)
        in_place: dict[str, bool] = {}
        for name, places in sorted(parts.items()):
            trained = {part is not None for part in set().union(*places.values())}
            if len(trained) > 1:
                raise UsageError(
                    f"[pipeline] '{name}' is trained on one stage and frozen on another; freeze it on all or on none"
                )
            if trained == {True}:
                in_place[name] = all(len(part) == 1 for part in places.values())

        self._in_place, self._trained = in_place, here

    def _used(self, engine: PipelineEngine) -> set[str]:
        """Those of which a rank of any stage has a gradient. Collective."""
        if not self._in_place:
            return set()
        here = {
            name
            for name, param, *_ in self._tied
            if name in self._in_place
            and engine.core.local_view(engine._index[id(param)], _core.Quantity.Gradient) is not None
        }
        rows = engine._over.rows([float(name in here) for name in self._in_place])
        return {name for name, used in zip(self._in_place, rows.any(0).tolist(), strict=True) if used}

    def sum_gradients(self, engine: PipelineEngine) -> None:
        """Every copy's gradient becomes the sum of all copies'; one that was not used in its place adds zero. What no
        place used has no gradient, as in the whole model. Collective."""
        used = self._used(engine)
        for name, param, group, _ in self._tied:
            if name not in used:
                continue
            number = engine._index[id(param)]
            engine.core.complete_gradient(number)
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
