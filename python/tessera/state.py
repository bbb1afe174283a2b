"""Full and local values of what an engine keeps: fp32 masters, gradients, optimizer states.

Full values are fp32 and have the shape of the parameter; reading and writing them is collective. Local ones are what
this rank holds, fp32 too (views where it is held so): shaped like the parameter at stage 0, else 1-D and possibly
empty. Everything is None for parameters that are not optimized, and for gradients outside the time between a backward
and its step. A parameter that waits to be trained (thawed, or of an added param group) joins with the first collective
call for it here; until then its local values are None.
"""

from __future__ import annotations

import torch

from tessera import _core
from tessera.engine import Engine
from tessera.engine.front import engine_behind
from tessera.optim.engines import OptimizerStates

__all__ = [
    "get_full_fp32_param",
    "get_full_grad",
    "get_full_optimizer_state",
    "get_local_fp32_param",
    "get_local_grad",
    "get_local_optimizer_state",
    "local_range",
    "set_full_fp32_param",
    "set_full_grad",
    "set_full_optimizer_state",
    "set_local_fp32_param",
    "set_local_grad",
    "set_local_optimizer_state",
]


def get_full_fp32_param(engine: Engine, param: torch.Tensor) -> torch.Tensor | None:
    """The master, or the parameter itself where it is its own master."""
    return _get_full(engine, param, _core.Quantity.Master)


def get_full_grad(engine: Engine, param: torch.Tensor) -> torch.Tensor | None:
    """The gradient as step() will use it, before clipping; before its reduction this rank's own."""
    return _get_full(engine, param, _core.Quantity.Gradient)


def get_full_optimizer_state(engine: Engine, param: torch.Tensor, key: str) -> torch.Tensor | None:
    """`key` as in torch's optimizer state: "exp_avg", "exp_avg_sq", "momentum_buffer", "sum", ..., and "step", a tensor
    without dimensions. For an optimizer that runs itself, any state that has one value for each element, or one for
    all; None before its first step."""
    number = _joined(engine, param)
    return _states(engine).get_full(number, key) if number in engine.trained_numbers() else None


def set_full_fp32_param(engine: Engine, param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets the master and the parameter itself."""
    engine.core.set_full(_joined(engine, param), _core.Quantity.Master, value)
    engine.core.refresh_params()


def set_full_grad(engine: Engine, param: torch.Tensor, value: torch.Tensor) -> None:
    """The gradient that step() will use, the same value on all ranks."""
    engine.core.set_full(_joined(engine, param), _core.Quantity.Gradient, value)


def set_full_optimizer_state(engine: Engine, param: torch.Tensor, key: str, value: torch.Tensor) -> None:
    """Sets what get_full_optimizer_state() gives; ConfigError for a parameter that is not optimized."""
    _states(engine).set_full(_joined(engine, param), key, value)


def get_local_fp32_param(engine: Engine, param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of the master."""
    return _get_local(engine, param, _core.Quantity.Master)


def get_local_grad(engine: Engine, param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of the gradient, once it is reduced."""
    return _get_local(engine, param, _core.Quantity.Gradient)


def get_local_optimizer_state(engine: Engine, param: torch.Tensor, key: str) -> torch.Tensor | None:
    """This rank's part of what get_full_optimizer_state() gives."""
    number = _number(engine, param)
    return _states(engine).get_local(number, key) if number in engine.trained_numbers() else None


def local_range(engine: Engine, param: torch.Tensor) -> tuple[int, int]:
    """This rank's part of the flattened parameter, [begin, end)."""
    return engine.core.local_range(_number(engine, param))


def set_local_fp32_param(engine: Engine, param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets this rank's part of the master. Collective: the parameter is refreshed on all ranks."""
    _joined(engine, param)
    _set_local(engine, param, _core.Quantity.Master, value)
    engine.core.refresh_params()


def set_local_grad(engine: Engine, param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets this rank's part of the gradient."""
    _set_local(engine, param, _core.Quantity.Gradient, value)


def set_local_optimizer_state(engine: Engine, param: torch.Tensor, key: str, value: torch.Tensor) -> None:
    """Sets this rank's part of a state; ConfigError for a parameter that is not optimized."""
    _states(engine).set_local(_number(engine, param), key, value)


def _number(engine: Engine, param: torch.Tensor) -> int:
    return engine.core.number_of(param)


def _joined(engine: Engine, param: torch.Tensor) -> int:
    """The parameter's number, once what waits to be trained has joined. Collective for one that has a group and is not
    trained, frozen or not: ranks that differ there get an error."""
    number = _number(engine, param)
    if number not in engine.trained_numbers() and engine.core.param(number).joins >= 0:
        engine_behind(engine).join_thawed()
    return number


def _get_full(engine: Engine, param: torch.Tensor, what: _core.Quantity) -> torch.Tensor | None:
    number = _joined(engine, param)
    return engine.core.get_full(number, what) if number in engine.trained_numbers() else None


def _get_local(engine: Engine, param: torch.Tensor, what: _core.Quantity) -> torch.Tensor | None:
    number = _number(engine, param)
    view = engine.core.local_view(number, what) if number in engine.trained_numbers() else None
    return None if view is None else view.float()


def _set_local(engine: Engine, param: torch.Tensor, what: _core.Quantity, value: torch.Tensor) -> None:
    engine.core.set_local(_number(engine, param), what, value)


def _states(engine: Engine) -> OptimizerStates:
    states: OptimizerStates = engine_behind(engine).optimizer_states()
    return states
