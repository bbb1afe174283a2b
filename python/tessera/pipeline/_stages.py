"""The stages of a pipeline, as the engine of one of them asks them, and what they agree on while they are built."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from tessera import _core
from tessera.engine.program import Names, Program
from tessera.pipeline._checks import form_of
from tessera.pipeline._grid import Everyone, Grid


class Stages(Program):
    of_several = True

    def __init__(self, everyone: Everyone) -> None:
        self._everyone = everyone
        self.building = _core.Building(everyone.group, f"rank {everyone.rank}", everyone.device)
        self._grid: Grid | None = None
        self.own_inputs = True  # of the forward that comes

    def made(self, grid: Grid) -> None:
        """From here on errors name stages."""
        self._grid = grid
        self.building.set_where(grid.name())

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """The construction: an error of one rank is one of all (tessera/pipeline/failure.h). Collective."""
        try:
            yield
        except Exception as error:
            self.building.fail(error)
            raise
        self.agree()

    def agree(self) -> None:
        """This rank goes on. StageFailed where another one has failed. Collective."""
        self.building.agree()

    def end(self) -> None:
        """The engine has ended: lets go of the process groups."""
        self._grid = None
        del self._everyone, self.building

    # ---- of one of the engines

    def speaks(self) -> bool:
        return self._grid is not None and self._grid.stage == 0

    def optimizer_made(self, base: torch.optim.Optimizer | None, given: list[int]) -> None:
        assert self._grid is not None
        own = None if base is None else form_of(base)
        self.agree()
        _core.check_optimizers(self._grid.ranks, own)
        if base is not None:
            _core.check_groups_take(self._grid.ranks, given)

    def casts_inputs(self) -> bool:
        return self.own_inputs

    def buildable(self) -> None:
        self.agree()

    def device(self) -> torch.device | None:
        return None if self._grid is None else self._grid.device

    def group_names(self, own: Names) -> Names:
        """Of all stages, each name once."""
        return [
            list(dict.fromkeys((name, trained) for names in same for name, trained in names))
            for same in zip(*self._everyone.values(own), strict=True)
        ]
