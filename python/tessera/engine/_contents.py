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
from tessera.errors import UsageError
from tessera.optim.engines import params_of

_END = (object(),)  # behind all that is compared: a list that has grown does not pass for a beginning


class Contents:
    """`core`, `base`: the engine's, and the optimizer that updates it. `warn`: warns the user; None on ranks
    that do not."""

    def __init__(
        self,
        model: nn.Module,
        core: _core.Engine,
        base: torch.optim.Optimizer | None,
        warn: Callable[[list[str]], None] | None,
    ) -> None:
        self._core, self._base, self._warn = core, base, warn
        self._built = _named(model)
        self._names = {name for name, *_ in self._built}
        # Parameters that something else hides from the start.
        self._hidden = {name for name, number, _ in self._built if id(_attribute(model, name)) != number}
        self._note(model, set())

    def _note(self, model: nn.Module, known: set[int]) -> None:
        self._model = model
        modules = list(model.modules())
        parts = [part for module in modules for part in (module._parameters, module._modules)]
        self._empty = [part for part in parts if not part]
        self._values: list[Iterable[Any]] = [*(part.values() for part in parts if part), _END]
        self._seen = list(itertools.chain.from_iterable(self._values))
        # A plain attribute of a module comes before what is registered under the name.
        registered = ((vars(m).keys(), part.keys()) for m in modules for part in (m._parameters, m._modules) if part)
        self._apart = [(plain, names) for plain, names in registered if plain.isdisjoint(names)]
        # Frozen, and of nobody's: no fault while they are.
        self._later = [p for n, p in model.named_parameters() if n not in self._names and id(p) not in known]

    def fault(self, model: nn.Module) -> str:
        """What is wrong with `model`, without an origin; empty where nothing is. Local."""
        now = itertools.chain.from_iterable(self._values)
        if (
            model is self._model
            and not any(self._empty)
            and all(map(operator.is_, now, self._seen))
            and all(plain.isdisjoint(names) for plain, names in self._apart)
            and not any(param.requires_grad for param in self._later)
        ):
            return ""
        joining = [] if self._base is None else params_of(self._base.param_groups)
        known = {id(param) for param in (*(spec.tensor for spec in self._core.params()), *joining)}
        fault, warning = _core.compare_contents(self._built, self._read(model), known)
        if not fault:
            self._note(model, known)
            if warning and self._warn is not None:
                self._warn([warning])
        return fault

    def check(self, model: nn.Module, call: str) -> None:
        """UsageError where something is. Local."""
        if fault := self.fault(model):
            raise UsageError(f"[engine.{call}] {fault}")

    def _read(self, model: nn.Module) -> list[tuple[str, int, bool]]:
        """Parameters by name, and what the forward reads in their place: plain attributes, buffers."""
        now = _named(model)
        present = {(name, number) for name, number, _ in now}
        moved = {number for name, number, _ in now if name not in self._names}
        for name, number, _ in self._built:
            value = _attribute(model, name)
            if not isinstance(value, torch.Tensor) or number in moved or name in self._hidden:
                continue
            if (name, id(value)) not in present:
                now.append((name, id(value), value.requires_grad))
        return now


def _attribute(model: nn.Module, name: str) -> Any:
    """The attribute that code which reads it gets, but for properties, and for what functional_call() has put there."""
    found: Any = model
    for part in name.split("."):
        if not isinstance(found, nn.Module):
            return None
        if part in vars(found):
            found = vars(found)[part]
        elif part in found._parameters:
            found = dict(found._parameters.items())[part]  # the item as it is: reading it may gather it
            return found if isinstance(found, nn.Parameter) else None
        else:
            found = found._buffers[part] if part in found._buffers else dict(found._modules).get(part)
    return found


def _named(model: nn.Module) -> list[tuple[str, int, bool]]:
    """All parameters by name. A tensor that functional_call() has put into a module is no Parameter, and is left
    out."""
    named = model.named_parameters(remove_duplicate=False)
    return [(name, id(param), param.requires_grad) for name, param in named if isinstance(param, nn.Parameter)]
