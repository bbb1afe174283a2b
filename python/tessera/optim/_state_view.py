"""`optimizer.state` over what the core keeps."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from tessera import _core
from tessera.errors import ConfigError, UsageError
from tessera.optim import _parts
from tessera.optim._rules import NativeRule
from tessera.optim._states import QUANTITIES


class ParamState(dict[str, Any]):
    """`optimizer.state[param]`: what is given to a key is copied in."""

    def __init__(self, view: StateView, param: torch.Tensor, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._view = view
        self._param = param

    def __setitem__(self, key: str, value: Any) -> None:
        self._view.set_one(self._param, key, value)
        super().__setitem__(key, self._view[self._param].get(key, value))

    def update(self, *args: Any, **more: Any) -> None:
        for key, value in dict(*args, **more).items():
            self[key] = value

    def __ior__(self, other: Any) -> ParamState:  # type: ignore[override, misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def clear(self) -> None:
        del self._view[self._param]
        super().clear()

    def __delitem__(self, key: str) -> None:
        raise UsageError(
            f"[optimizer.state] {key!r} cannot be taken out alone: the engine keeps all states of a parameter or none; "
            "give it a value, or clear() them"
        )

    def pop(self, key: str, *default: Any) -> Any:
        if key in self or not default:
            del self[key]
        return default[0]

    def popitem(self) -> tuple[str, Any]:
        raise UsageError("[optimizer.state] the engine keeps all states of a parameter or none; clear() them")

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class StateView(MutableMapping[torch.Tensor, dict[str, Any]]):
    """`optimizer.state` over the buffers of the core: {param: {"step": tensor, "exp_avg": view, ...}}.

    Tensors are views: changing them in place changes the training state, but not of states that are offloaded, whose
    tensors are copies. They have the shape of the parameter where every rank holds all of it (stage 0), else they are
    this rank's 1-D part. Assigning a dict, or a value in one, copies it in; tensors that were read before keep what
    they had, so that states may be exchanged.
    """

    def __init__(
        self,
        core: _core.Engine,
        params: list[torch.Tensor],
        index: Mapping[int, int],
        names: list[str],
        rule: NativeRule,
    ) -> None:
        self._core = core
        self._params = params
        self._index = dict(index)
        self.names = names
        self._rule = rule
        self._lent: dict[tuple[int, _core.Quantity], list[weakref.ref[torch.Tensor]]] = {}

    def indices(self) -> list[int]:
        """The numbers of its parameters in the core."""
        return list(self._index.values())

    def manages(self, param: object) -> bool:
        return id(param) in self._index

    def _present(self, param: torch.Tensor) -> bool:
        index = self._index.get(id(param))
        return index is not None and (self._rule.state_from_start or self._core.param_step(index) > 0)

    def __contains__(self, param: object) -> bool:
        return isinstance(param, torch.Tensor) and self._present(param)

    def __getitem__(self, param: torch.Tensor) -> ParamState:
        if not self._present(param):
            if self.manages(param):
                return ParamState(self, param, {})  # empty, as torch's defaultdict before the first step
            raise KeyError("this tensor is not optimized here")
        index = self._index[id(param)]
        state: dict[str, Any] = {}
        if self._rule.counts_steps:
            state["step"] = torch.tensor(float(self._core.param_step(index)))
        for name, quantity in zip(self.names, QUANTITIES, strict=False):
            state[name] = self._lend(index, quantity)
        return ParamState(self, param, state)

    def _lend(self, index: int, quantity: _core.Quantity) -> torch.Tensor | None:
        view = self._core.local_view(index, quantity)
        if view is not None:
            lent = self._lent.get((index, quantity), ())
            self._lent[index, quantity] = [*(ref for ref in lent if ref() is not None), weakref.ref(view)]
        return view

    def set_one(self, param: torch.Tensor, key: str, value: Any) -> None:
        keys = [*(["step"] if self._rule.counts_steps else []), *self.names]
        if key not in keys:
            raise UsageError(f"[optimizer] no optimizer state {key!r} is kept here; there are {', '.join(keys)}")
        self[param] = {key: value}

    def __setitem__(self, param: torch.Tensor, state: Mapping[str, Any]) -> None:
        if not state:
            del self[param]
            return
        index = self._index[id(param)]
        state = _parts.taken(self._core, index, dict(state))
        found = False
        for name, quantity in zip(self.names, QUANTITIES, strict=False):
            value = state.get(name)
            if value is not None:
                self._write(index, quantity, value)
                found = True
        if "step" in state:
            self._core.set_param_step(index, int(state["step"]))
        elif found and not self._rule.counts_steps:
            self._core.set_param_step(index, max(1, self._core.param_step(index)))

    def _write(self, index: int, quantity: _core.Quantity, value: torch.Tensor) -> None:
        """Writes this rank's part, or all of the value. Local: ranks may hold a part of other parameters each, and load
        alone."""
        view = self._core.local_view(index, quantity)
        if view is None:
            return
        value = value.detach().to(view.device)
        if value.untyped_storage()._cdata == view.untyped_storage()._cdata:
            value = value.clone()
        for ref in self._lent.pop((index, quantity), ()):
            old = ref()
            if old is not None:
                old.data = old.detach().clone()
        part = value if value.shape == view.shape else _parts.part_in(self._core, index, value)
        if part is None:
            sizes = self._core.param(index).whole_sizes
            raise ConfigError(
                f"[optimizer] a state of '{self._core.param(index).name}' has shape {list(value.shape)}: neither that "
                f"of the parameter, {sizes}, nor of this rank's part of it, {list(view.shape)}"
            )
        self._core.set_local(index, quantity, part)

    def __delitem__(self, param: torch.Tensor) -> None:
        index = self._index[id(param)]
        for quantity in QUANTITIES[: len(self.names)]:
            view = self._core.local_view(index, quantity)
            if view is not None:
                self._write(index, quantity, torch.zeros_like(view))
        self._core.set_param_step(index, 0)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (param for param in self._params if self._present(param))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def add(self, param: torch.Tensor, number: int) -> None:
        self._index[id(param)] = number
        self._params.append(param)

    def number(self, param: torch.Tensor) -> int:
        return self._index[id(param)]

    def copied(self, param: torch.Tensor) -> dict[str, Any]:
        """A plain dict with copies, to live without the engine."""
        return {name: shaped_like(value, param).clone() for name, value in self[param].items() if value is not None}


def shaped_like(value: Any, param: torch.Tensor) -> Any:
    """A 1-D part that is all of the parameter, in the parameter's shape."""
    size = torch.Tensor.size(param)  # whatever a class of parameters shows
    if isinstance(value, torch.Tensor) and value.shape == (size.numel(),):
        return value.as_strided(size, param.stride())
    return value
