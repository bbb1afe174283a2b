"""Regions in which partitioned parameters are whole."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tessera import _core
from tessera.errors import ConfigError
from tessera.zero._hooks import register_external_parameter
from tessera.zero._owners import Holder, engine_of, holder_of, home_of

Part = tuple[Holder, list[int]]  # parameters of one holder, by their numbers there


class Region:
    """Inside the `with` the parameters of `parts` are whole. `writes`: whose values hold afterwards, with FromRank
    those of `writer`; None_: nothing may be written. Collective, also where an exception leaves it: what was written
    before holds."""

    def __init__(self, parts: list[Part], writes: _core.Writes = _core.Writes.None_, writer: int = 0) -> None:
        self._parts = parts
        self._writes = writes
        self._writer = writer

    def __enter__(self) -> None:
        for number, (holder, numbers) in enumerate(self._parts):
            try:
                holder.gather(numbers, self._writes, self._writer)
            except BaseException:
                for open_holder, open_numbers in self._parts[:number]:  # nothing is written yet
                    with contextlib.suppress(RuntimeError):
                        open_holder.release(open_numbers, _core.Writes.None_, 0)
                raise

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        failure: BaseException | None = None
        for holder, numbers in self._parts:
            try:
                if not holder.destroyed():
                    holder.release(numbers, self._writes, self._writer)
            except BaseException as own:
                failure = failure or own
        if failure is not None and error is None:
            raise failure
        if failure is not None:  # the error that leaves the region says more
            warnings.warn(f"[zero] GatheredParameters: {failure}", stacklevel=3)


def parts_of(params: Iterable[torch.Tensor], writable: bool) -> list[Part]:
    """The holders of those `params` that must be gathered, with numbers. `writable`: some rank's values may hold in the
    end."""
    numbers: dict[int, tuple[Holder, list[int]]] = {}
    for param in params:
        found = holder_of(param)
        if found is None:
            continue
        holder, number = found
        if not writable and isinstance(holder, _core.Engine) and not home_of(param):
            continue  # whole on every rank
        numbers.setdefault(id(holder), (holder, []))[1].append(number)
    return list(numbers.values())


class GatheredParameters:
    """Inside the `with`, `params` (one parameter, a list or any iterable) are whole; afterwards partitioned again.

    Collective: every rank opens and closes the region with the same parameters. Those of a model that zero.Init built
    need no engine. `modifier_rank`: what that rank (of the data-parallel group) writes holds on all ranks, in every
    stage and also of small and frozen parameters; of an expert or a slice, what the rank in its place writes. None:
    writing is an error (UsageError, when the region ends), but of parameters that are not partitioned, where it is each
    rank's own affair. ConfigError for what is no rank. An exception that leaves the region leaves it as its end does:
    what was written before holds, as in plain PyTorch.
    `fwd_module`: also registers the parameters as external to that module. Regions must not overlap. A whole unit is
    gathered, also for one parameter of it.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, torch.Tensor):
            params = [params]
        is_module = isinstance(params, nn.Module)
        given: list[Any] = [] if is_module else [one for one in params if one is not None]  # as the bias of a layer
        if is_module or not all(isinstance(one, torch.Tensor) for one in given):
            raise ConfigError(
                "[zero.GatheredParameters] params are parameters, as list(model.parameters()), not modules or pairs of "
                "named_parameters()"
            )
        self.params = given if enabled else []
        self.modifier_rank = modifier_rank
        self._open = Region([])
        self._begun: list[tuple[_core.Engine, list[int]]] = []
        self._ids = frozenset(map(id, self.params))
        self._engines: list[weakref.ref[Any]] = []  # engines that hold these parameters, while they are gathered
        if fwd_module is not None:
            for param in self.params:
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> None:
        unique = {id(param): param for param in self.params}
        parts = parts_of(unique.values(), writable=self.modifier_rank is not None)
        writes = _core.Writes.None_ if self.modifier_rank is None else _core.Writes.FromRank
        self._open = Region(parts, writes, self.modifier_rank or 0)
        self._open.__enter__()
        # Also of what is whole anyway, which nobody gathers for reading.
        all_parts = parts_of(unique.values(), writable=True)
        self._begun = [(core, numbers) for core, numbers in all_parts if isinstance(core, _core.Engine)]
        for core, numbers in self._begun:
            core.note_begun(numbers)
        engines = {id(of): of for param in self.params if (of := engine_of(param)) is not None}
        for engine in engines.values():
            engine.open_regions.append(self._ids)
        self._engines = [weakref.ref(engine) for engine in engines.values()]

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Lets the parameters be as outside the region inside this `with`. Collective."""
        self._open.__exit__(None, None, None)
        try:
            yield
        finally:
            self._open.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        region, self._open = self._open, Region([])
        begun, self._begun = self._begun, []
        for core, numbers in begun:
            if not core.destroyed():
                core.note_ended(numbers)
        for engine in filter(None, (known() for known in self._engines)):
            engine.open_regions.remove(self._ids)
        self._engines = []
        region.__exit__(kind, error, trace)
