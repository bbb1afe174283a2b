"""What an engine puts on modules, parameters and optimizers that are not its own.

Note [Loans]
  Everything that an engine leaves on an object of a user's (attributes, hooks, a dict in the place of another one) goes
  through the Loans of that engine. give_back() takes it off again, which ends the engine's hold on its module; and
  copies and pickles of a module are made without it, so that a copy is a plain module in no engine's care.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_ABSENT = object()
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


class StandIn(dict[str, Any]):
    """A dict in the place of another one, which has the same content once settle() was called."""

    def __init__(self, original: dict[str, Any]) -> None:
        super().__init__(original)
        self._original = original

    def settle(self) -> None:
        self._original.clear()
        self._original.update(self)


class Loans:
    def __init__(self) -> None:
        # By id of the owner: the owner, and (name, what was there before, what is there now), oldest first.
        self._changes: dict[int, tuple[Any, list[tuple[str, Any, Any]]]] = {}
        self._handles: list[Any] = []
        self._hooks: set[int] = set()

    def put(self, owner: object, name: str, value: object) -> None:
        """Sets an attribute, past what the class of `owner` does about that."""
        self._note(owner, name, vars(owner).get(name, _ABSENT), value)
        vars(owner)[name] = value

    def lend(self, owner: object, name: str, value: object) -> None:
        """Sets an attribute of a module, parameter or optimizer for as long as the engine lives; copies of a module are
        made without it."""
        self.put(owner, name, value)
        if isinstance(owner, nn.Module):
            self.keep_off_copies(owner)

    @contextmanager
    def watching(self, owners: Iterable[Any], name: str) -> Iterator[None]:
        """Notes what is done to this attribute of the owners inside; give_back() undoes it."""
        before = [(owner, vars(owner).get(name, _ABSENT)) for owner in owners]
        try:
            yield
        finally:
            for owner, value in before:
                now = vars(owner).get(name, _ABSENT)
                if now is not value:
                    self._note(owner, name, value, now)

    def hook(self, handle: Any) -> None:
        self._handles.append(handle)
        self._hooks.add(handle.id)

    def keep_off_copies(self, module: nn.Module) -> None:
        """Copies of `module` are made without what is put here. (ScriptModules copy themselves.)"""
        if not isinstance(module, torch.jit.ScriptModule) and "__getstate__" not in vars(module):
            self.put(module, "__getstate__", functools.partial(self._state_of, module))

    def give_back(self) -> None:
        """Makes all as it was; what others have changed since stays as they want it."""
        for handle in self._handles:
            handle.remove()
        for owner, changes in self._changes.values():
            _undo(vars(owner), changes)
        self._changes.clear()
        self._handles.clear()
        self._hooks.clear()

    def _note(self, owner: Any, name: str, before: Any, now: Any) -> None:
        self._changes.setdefault(id(owner), (owner, []))[1].append((name, before, now))

    def _state_of(self, module: nn.Module) -> Any:
        own = getattr(type(module), "__getstate__", None)  # object has one too, since Python 3.11
        state = vars(module) if own is None else own(module)
        if not isinstance(state, dict):
            return state  # the class makes its own state
        state = dict(state)
        _undo(state, self._changes[id(module)][1])
        for name in _HOOKS:
            hooks = state.get(name, {})
            if not self._hooks.isdisjoint(hooks):
                state[name] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in self._hooks)
        return state


def _undo(attributes: dict[str, Any], changes: list[tuple[str, Any, Any]]) -> None:
    for name, before, now in reversed(changes):
        if attributes.get(name, _ABSENT) is not now:
            continue
        if isinstance(now, StandIn):
            now.settle()
        if before is _ABSENT:
            attributes.pop(name, None)
        else:
            attributes[name] = before


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Calls the closure of an optimizer's step(), with gradients on; returns what it returns."""
    with torch.enable_grad():
        return None if closure is None else closure()


def step_of(engine: weakref.ref[Any]) -> Callable[..., Any]:
    """optimizer.step() of a client's optimizer in the care of an engine: a complete step."""

    @functools.wraps(torch.optim.Optimizer.step)
    def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        live = engine()
        if live is None:
            return type(optimizer).step(optimizer)  # the engine is gone: torch's own
        live.step()
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # NativeRunner.after_step tells schedulers
    return step


def add_param_group_of(engine: weakref.ref[Any]) -> Callable[..., None]:
    """optimizer.add_param_group() of a client's optimizer in the care of an engine, which takes the group too."""

    @functools.wraps(torch.optim.Optimizer.add_param_group)
    def add_param_group(optimizer: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        live = engine()
        if live is None or live.core.destroyed():
            type(optimizer).add_param_group(optimizer, param_group)
        else:
            live.add_param_group(param_group)

    return add_param_group


def zero_grad_of_optimizer(engine: weakref.ref[Any]) -> Callable[..., None]:
    """optimizer.zero_grad() of a client's optimizer whose gradients an engine keeps."""

    @functools.wraps(torch.optim.Optimizer.zero_grad)
    def zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        live = engine()
        if live is None or live.core.destroyed():
            type(optimizer).zero_grad(optimizer, set_to_none)
        else:
            live.core.zero_grad()

    return zero_grad


def zero_grad_of(engine: weakref.ref[Any], module: nn.Module) -> Callable[..., None]:
    """module.zero_grad() where gradients are not in p.grad."""

    @functools.wraps(type(module).zero_grad)
    def zero_grad(*args: Any, **kwargs: Any) -> None:
        live = engine()
        if live is not None and not live.core.destroyed():
            live.core.zero_grad()
        type(module).zero_grad(module, *args, **kwargs)

    return zero_grad
