"""Full and local values of the states that an optimizer which runs itself keeps (runners.ExternalRunner).

It keeps them for this rank's part of a parameter, and nothing where that is empty: what a state is has to be agreed
upon before values are gathered.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch

from tessera.engine import Engine
from tessera.errors import ConfigError
from tessera.runners import ExternalRunner


class _Kind(IntEnum):
    """What a rank has for a key; the largest of all ranks is what the state is."""

    NOTHING = 0  # no part of the parameter, or no step yet
    NUMBER = 1  # one for the whole parameter, such as "step"
    PART = 2  # a value for each element of this rank's part
    OTHER = 3  # such as Adafactor's rows and columns
    UNKNOWN = 4  # it has states, and none of this name


def get_full(engine: Engine, runner: ExternalRunner, number: int, key: str) -> torch.Tensor | None:
    """fp32, with the shape of the parameter; a number of its own is a tensor without dimensions. None before the
    optimizer has made it. Collective."""
    value, kind = _look(engine, runner, number, key)
    if kind == _Kind.NOTHING:
        return None
    if kind == _Kind.NUMBER:
        return torch.tensor(engine.core.agree_max(-torch.inf if value is None else float(value)))
    part = torch.empty(0) if value is None else value.detach()
    return engine.core.gather_full(number, part)


def set_full(engine: Engine, runner: ExternalRunner, number: int, key: str, full: torch.Tensor) -> None:
    """Collective."""
    value, kind = _look(engine, runner, number, key)
    if kind == _Kind.NOTHING:
        raise ConfigError(f"[state] {_name(runner)} has no state {key!r} of this parameter yet: it makes it in a step")
    part = full if kind == _Kind.NUMBER else engine.core.local_part(number, full)
    if value is not None:
        _write(runner, number, key, part)


def get_local(engine: Engine, runner: ExternalRunner, number: int, key: str) -> torch.Tensor | None:
    state = runner.state_of(number)
    kind = _kind(runner, number, state, key)
    if kind == _Kind.NOTHING:
        begin, end = engine.core.local_range(number)
        return torch.empty(0) if begin == end and runner.has_states() else None
    _refuse(runner, kind, key, state)
    return torch.as_tensor(state[key]).detach().float()


def set_local(runner: ExternalRunner, number: int, key: str, part: torch.Tensor) -> None:
    state = runner.state_of(number)
    kind = _kind(runner, number, state, key)
    _refuse(runner, kind, key, state)
    if kind == _Kind.NOTHING:
        if part.numel() > 0:
            raise ConfigError(f"[state] this rank has no state {key!r} of this parameter")
        return
    if part.numel() != torch.as_tensor(state[key]).numel():
        raise ConfigError(
            f"[state] state {key!r} has {torch.as_tensor(state[key]).numel()} values here, not {part.numel()}"
        )
    _write(runner, number, key, part)


def _look(engine: Engine, runner: ExternalRunner, number: int, key: str) -> tuple[Any, _Kind]:
    """This rank's value, and what the state is on all ranks alike."""
    state = runner.state_of(number)
    kind = _Kind(int(engine.core.agree_max(float(_kind(runner, number, state, key)))))
    _refuse(runner, kind, key, state)
    return state.get(key), kind


def _kind(runner: ExternalRunner, number: int, state: dict[str, Any], key: str) -> _Kind:
    if not state:
        return _Kind.NOTHING
    if key not in state:
        return _Kind.UNKNOWN
    value = state[key]
    if isinstance(value, torch.Tensor) and value.shape == runner.target_of(number).shape:
        return _Kind.PART
    if isinstance(value, bool | int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0):
        return _Kind.NUMBER
    return _Kind.OTHER


def _refuse(runner: ExternalRunner, kind: _Kind, key: str, state: dict[str, Any]) -> None:
    if kind == _Kind.UNKNOWN:
        there = f"; there are {', '.join(map(str, state))}" if state else ""
        raise ConfigError(f"[state] {_name(runner)} has no state {key!r} of this parameter{there}")
    if kind == _Kind.OTHER:
        raise ConfigError(
            f"[state] {_name(runner)}'s state {key!r} is not one value for each element: read optimizer.state"
        )


def _write(runner: ExternalRunner, number: int, key: str, part: torch.Tensor) -> None:
    state = runner.state_of(number)
    value = state[key]
    if isinstance(value, torch.Tensor):
        value.copy_(part.detach().reshape(value.shape))
    else:
        state[key] = type(value)(part.item())


def _name(runner: ExternalRunner) -> str:
    return type(runner.base).__name__
