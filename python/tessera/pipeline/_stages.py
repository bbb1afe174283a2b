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

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """A part of the construction that stages do each for themselves: an error of one is one of all. Collective."""
        try:
            yield
        except StageFailed:
            raise
        except dist.DistBackendError as error:  # this rank has no exchange any more
            self._everyone.group.abort(self._failure_text(error))
            raise
        except Exception as error:
            self._agree(error)
            raise
        self._agree()

    def _failure_text(self, problem: Exception) -> str:
        where = self.grid.name() if self.grid is not None else f"rank {self._everyone.rank}"
        return f"[pipeline] {where} failed while it was built: {type(problem).__name__}: {problem}"

    def _agree(self, problem: Exception | None = None) -> None:
        texts = self._everyone.texts("" if problem is None else self._failure_text(problem))
        if problem is None and any(texts):
            raise StageFailed(next(filter(None, texts)))

    # ---- of one of the engines

    def speaks(self) -> bool:
        return self.grid is not None and self.grid.stage == 0

    def optimizer_made(self, base: torch.optim.Optimizer | None) -> None:
        assert self.grid is not None
        self._agree()
        own = Optimizer.of(base)
        everyone = self._everyone.values(None if own is None else own.plain())
        check_optimizers([None if one is None else Optimizer.from_plain(one) for one in everyone], self.grid.name)

    def buildable(self) -> None:
        self._agree()

    def device(self) -> torch.device | None:
        return None if self.grid is None else self.grid.device

    def group_names(self, own: Names) -> Names:
        """Of all stages, each name once."""
        return [
            list(dict.fromkeys((name, trained) for names in same for name, trained in names))
            for same in zip(*self._everyone.values(own), strict=True)
        ]
