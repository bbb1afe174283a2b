"""The stages of a pipeline, as the engine of one of them asks them, and what they agree on while they are built."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from tessera.engine.program import Names, Program
from tessera.errors import StageFailed
from tessera.pipeline._checks import Optimizer, check_optimizers
from tessera.pipeline._grid import Everyone, Grid


class Stages(Program):
    of_several = True

    def __init__(self, everyone: Everyone) -> None:
        self._everyone = everyone
        self.grid: Grid | None = None  # until it is made, errors name ranks
        self.own_inputs = True  # of the forward that comes

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """The construction: an error of one rank is one of all. Up to an exchange its errors are a rank's own, so that
        agree() comes before each. Collective."""
        try:
            yield
        except StageFailed:
            raise
        except dist.DistBackendError as error:  # this rank has no exchange any more
            self._everyone.group.abort(self._failure_text(error))
            raise
        except Exception as error:
            with contextlib.suppress(dist.DistBackendError):  # others are lost: this rank's own error says more
                self._everyone.agree(self._failure_text(error))
            raise
        self.agree()

    def agree(self) -> None:
        """This rank goes on. StageFailed where another one has failed. Collective."""
        self._everyone.agree()

    def _failure_text(self, problem: Exception) -> str:
        where = self.grid.name() if self.grid is not None else f"rank {self._everyone.rank}"
        return f"[pipeline] {where} failed while it was built: {type(problem).__name__}: {problem}"

    def end(self) -> None:
        """The engine has ended: lets go of the process groups."""
        self.grid = None
        del self._everyone

    # ---- of one of the engines

    def speaks(self) -> bool:
        return self.grid is not None and self.grid.stage == 0

    def optimizer_made(self, base: torch.optim.Optimizer | None) -> None:
        assert self.grid is not None
        self.agree()
        own = Optimizer.of(base)
        everyone = self._everyone.values(None if own is None else own.plain())
        check_optimizers([None if one is None else Optimizer.from_plain(one) for one in everyone], self.grid.name)

    def casts_inputs(self) -> bool:
        return self.own_inputs

    def buildable(self) -> None:
        self.agree()

    def device(self) -> torch.device | None:
        return None if self.grid is None else self.grid.device

    def group_names(self, own: Names) -> Names:
        """Of all stages, each name once."""
        return [
            list(dict.fromkeys((name, trained) for names in same for name, trained in names))
            for same in zip(*self._everyone.values(own), strict=True)
        ]
