"""The end of an engine: what it gives back, and to whom."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn

from tessera import _core
from tessera._loans import Loans
from tessera.engine._ranks import Ranks


class Ending(Protocol):
    """An engine that ends, built or half built: core, _parallel, _watch and _updates may not be there."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def client_optimizer(self) -> Any: ...
    @property
    def _loans(self) -> Loans: ...
    @property
    def _ranks(self) -> Ranks: ...
    @property
    def open_regions(self) -> list[frozenset[int]]: ...


def end(engine: Ending, waits: bool = True) -> None:
    """Whatever fails, the rest is given back. Safe to call twice. `waits`: for a save in the background."""
    there = vars(engine)
    core, parallel, updates = (there.get(name) for name in ("core", "_parallel", "_updates"))
    if core is not None and core.destroyed():
        return
    states: dict[int, dict[str, Any]] = {}
    # Apart from modes: the garbage collector may call this wherever torch traces something, with FakeTensorMode on.
    with _core.Apart(), contextlib.ExitStack() as steps:  # from the last to the first, whatever fails
        steps.callback(engine._ranks.discard)
        if parallel is not None:
            steps.callback(parallel.release)
        steps.callback(engine._ranks.release)
        if parallel is not None:
            steps.callback(parallel.undo)
        if core is not None:
            steps.callback(core.destroy, waits)
        steps.callback(engine._loans.give_back)
        if "_watch" in there:
            steps.callback(there["_watch"].close)
        if updates is not None and updates.runner is not None:
            steps.callback(updates.runner.release, updates.cuts_states, states)
            if engine.open_regions and engine.client_optimizer is not None:
                states.update(updates.runner.gather(_numbers_in(updates.core, engine.open_regions)))


def give_up(engine: Ending) -> None:
    """A construction failed, on all ranks alike: the module and the client's optimizer are their owner's again."""
    core = vars(engine).get("core")
    if core is not None:
        with contextlib.suppress(RuntimeError):
            core.gather(list(range(len(core.params()))), _core.Writes.None_, 0)


def _numbers_in(core: _core.Engine, regions: Iterable[frozenset[int]]) -> set[int]:
    inside = frozenset[int]().union(*regions)
    return {number for number, spec in enumerate(core.params()) if id(spec.tensor) in inside}
