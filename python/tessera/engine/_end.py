"""The end of an engine: what it gives back, and to whom."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch

from tessera import _core, _mesh
from tessera._copies import copy_of

if TYPE_CHECKING:
    from tessera.engine._engine import Engine


class EngineEnd:
    """How an Engine ends."""

    _open_regions: list[frozenset[int]]  # of zero.GatheredParameters: ids of their parameters

    def destroy(self) -> None:
        """Removes hooks, frees buffers and gives the client's optimizer back. Parameters keep their values; in stage 3
        those of a region that is open (zero.GatheredParameters). The optimizer's states are whole where every rank had
        all of them, and of parameters of an open region, in every stage: collective then. Else they are this rank's
        parts, which a new engine of the same ranks goes on with, and torch's own step() refuses. Safe to call twice;
        afterwards the module is as plain as before and can get a new engine."""
        engine = cast("Engine", self)
        if "core" in self.__dict__ and engine.core.destroyed():
            return
        states: dict[int, dict[str, Any]] = {}
        # Apart from modes: the garbage collector may call this wherever torch traces something, with FakeTensorMode on.
        with _core.Apart(), contextlib.ExitStack() as steps:  # from the last to the first, whatever fails
            steps.callback(_mesh.discard, engine._own_groups)
            if "_parallel" in self.__dict__:
                steps.callback(engine._parallel.release)
            steps.callback(setattr, self, "_mesh", _core.Mesh())
            if "_parallel" in self.__dict__:
                steps.callback(engine._parallel.undo)
            if "core" in self.__dict__:
                steps.callback(_destroy_core, engine)
            steps.callback(engine._loans.give_back)
            if "_watch" in self.__dict__:
                steps.callback(engine._watch.close)
            if (runner := engine._runner) is not None:
                steps.callback(runner.release, engine._cuts_states(), states)
                if self._open_regions and engine.client_optimizer is not None:
                    states.update(runner.gather(_numbers_in(engine, self._open_regions)))

    def __del__(self) -> None:
        # At the interpreter's end nobody is left to give anything back to, and torch may be half gone.
        if "core" in self.__dict__ and not sys.is_finalizing():
            self._open_regions = []  # this rank alone
            self.destroy()

    def _give_up(self) -> None:
        """A construction failed, on all ranks alike: the module and the client's optimizer are their owner's again."""
        if "core" in self.__dict__:
            core = cast("Engine", self).core
            with contextlib.suppress(RuntimeError):
                core.gather(list(range(len(core.params()))), False)
        self.destroy()


def _numbers_in(engine: Engine, regions: Iterable[frozenset[int]]) -> set[int]:
    inside = frozenset[int]().union(*regions)
    return {number for number, spec in enumerate(engine.core.params()) if id(spec.tensor) in inside}


def _destroy_core(engine: Engine) -> None:
    whole: dict[torch.Tensor, torch.Tensor] = {}  # of partitioned parameters that are so at the moment
    try:
        for param in engine.module.parameters():
            number = engine._index.get(id(param), -1)
            here = number >= 0 and engine.core.partition_of(number).partitioned and engine.core.is_gathered(number)
            if here and (copy := copy_of(param)) is not None:
                whole[param] = copy
    finally:
        engine.core.destroy()
    for gathered, value in whole.items():
        gathered.data = value
