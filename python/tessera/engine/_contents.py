"""Whether a model still has the parameters that its engine was built of: Note [Replaced parameters] in
tessera/engine/contents.h."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tessera import _core
from tessera.engine._report import logger
from tessera.errors import UsageError

_END = (object(),)  # behind all that is compared: a list that has grown does not pass for a beginning


class Contents:
    """`known`: the parameters of the engine, and those that are to join it, now. `tells`: this rank warns, for all."""

    def __init__(
        self,
        model: nn.Module,
        known: Callable[[], Iterable[torch.Tensor]],
        tells: bool,
    ) -> None:
        self._known = known
        self._tells = tells
        self._built = _named(model)
        self._note(model)

    def _note(self, model: nn.Module) -> None:
        self._model = model
        parts = [part for module in model.modules() for part in (module._parameters, module._modules)]
        self._empty = [part for part in parts if not part]
        self._values: list[Iterable[Any]] = [*(part.values() for part in parts if part), _END]
        self._seen = list(itertools.chain.from_iterable(self._values))

    def fault(self, model: nn.Module) -> str:
        """What is wrong with `model`, without an origin; empty where nothing is. Local."""
        now = itertools.chain.from_iterable(self._values)
        if model is self._model and not any(self._empty) and all(map(operator.is_, now, self._seen)):
            return ""
        fault, warning = _core.compare_contents(self._built, _named(model), {id(p) for p in self._known()})
        if not fault:
            self._note(model)
            if warning and self._tells:
                logger.warning(warning)
        return fault

    def check(self, model: nn.Module, call: str) -> None:
        """UsageError where something is. Local."""
        if fault := self.fault(model):
            raise UsageError(f"[engine.{call}] {fault}")


def _named(model: nn.Module) -> list[tuple[str, int, bool]]:
    """What functional_call() has put into a module is no Parameter, and goes again."""
    named = model.named_parameters(remove_duplicate=False)
    return [(name, id(param), param.requires_grad) for name, param in named if isinstance(param, nn.Parameter)]
