"""deepspeed.utils: masters, gradients and optimizer states of a parameter, without naming its engine.

Each function finds the engine that trains the parameter; tessera.state has the same for an engine at hand. Values
are fp32. Full ones have the shape of the parameter, and reading or writing them is collective; local ones are what this
rank holds (1-D from stage 1 on). Getters return None for parameters that no engine trains; setters raise ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from tessera.errors import ConfigError, UsageError
from tessera.zero.engines import engine_of

from tessera import Engine, state


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    engine = _trainer(param)
    return None if engine is None else state.get_full_fp32_param(engine, param)


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The gradient between a backward and its step(); None where there is none. In stages 1 and 2 asking at another
    time is a ConfigError."""
    engine = _in_time(param)
    return None if engine is None else state.get_full_grad(engine, param)


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    engine = _trainer(param)
    return None if engine is None else state.get_full_optimizer_state(engine, param, optim_state_key)


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """The master and the parameter itself."""
    state.set_full_fp32_param(_writer(param), param, value)


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    state.set_full_grad(_writer(param), param, value)


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    state.set_full_optimizer_state(_writer(param), param, optim_state_key, value)


def safe_update_full_grad_vectorized(
    params: Iterable[torch.Tensor], update_func: Callable[[torch.Tensor | None, torch.Tensor], torch.Tensor]
) -> None:
    """Replaces the gradient of each parameter by update_func(gradient, parameter). Collective."""
    for param in params:
        safe_set_full_grad(param, update_func(safe_get_full_grad(param), param))


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    engine = _trainer(param)
    return None if engine is None else state.get_local_fp32_param(engine, param)


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    engine = _in_time(param)
    return None if engine is None else state.get_local_grad(engine, param)


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    engine = _trainer(param)
    return None if engine is None else state.get_local_optimizer_state(engine, param, optim_state_key)


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Stage 3. Collective: the parameter is refreshed on all ranks."""
    state.set_local_fp32_param(_stage_3(param), param, value)


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Stage 3."""
    state.set_local_grad(_stage_3(param), param, value)


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Stage 3."""
    state.set_local_optimizer_state(_stage_3(param), param, optim_state_key, value)


def _trainer(param: torch.Tensor) -> Engine | None:
    """The engine that optimizes `param`."""
    engine = engine_of(param)
    return engine if isinstance(engine, Engine) and engine.trains(param) else None


def _in_time(param: torch.Tensor) -> Engine | None:
    engine = _trainer(param)
    if engine is None or engine.core.has_gradients():
        return engine
    placements = engine.config.placements
    if placements.shards_grads and not placements.shards_params:
        raise ConfigError("[utils] Gradients are only available immediately after backward and before engine.step()")
    return engine


def _writer(param: torch.Tensor) -> Engine:
    engine = _trainer(param)
    if engine is None:
        raise ConfigError("[utils] no engine trains this parameter: there is nothing to set")
    return engine


def _stage_3(param: torch.Tensor) -> Engine:
    engine = _writer(param)
    if not engine.config.placements.shards_params:
        raise UsageError("[utils] local values are set in stage 3 only; use the safe_set_full_ functions")
    return engine
