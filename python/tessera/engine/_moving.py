"""What an engine has on its device, elsewhere for a while: arguments of offload_states()."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from tessera import _core
from tessera.errors import ConfigError, UsageError

KINDS = {
    "optim_states": _core.StateKind.OptimizerStates,
    "hp_params": _core.StateKind.Masters,
    "lp_params": _core.StateKind.Weights,
    "lp_grads": _core.StateKind.Gradients,
    "contiguous_grad_buffer": _core.StateKind.Buckets,
}
DEVICES = {"none": None, "cpu": _core.Residence.Host, "nvme": _core.Residence.Nvme}


def _name(value: Any) -> str:
    return str(getattr(value, "value", value))  # members of enums too


def kinds_of(include: Iterable[Any] | None) -> list[_core.StateKind]:
    if include is None:
        return list(KINDS.values())
    names = [_name(kind) for kind in ([include] if isinstance(include, str) else include)]
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise ConfigError(f"[engine.offload_states] include: no such states: {unknown}; there are {list(KINDS)}")
    return [KINDS[name] for name in dict.fromkeys(names)]


def offload(
    core: _core.Engine, native: bool, config: _core.Config, include: Iterable[Any] | None, device: Any, pin_memory: bool
) -> None:
    """`native`: the core runs the optimizer."""
    kinds, place = kinds_of(include), _name(device)
    if place not in DEVICES:
        raise ConfigError(f"[engine.offload_states] device must be one of {list(DEVICES)}, got '{place}'")
    if not native:
        raise UsageError("[engine.offload_states] needs an optimizer that the engine runs itself, as AdamW")
    if config.get("zero_optimization.stage") == 3 and config.get("zero_optimization.offload_param.device") != "none":
        raise UsageError("[engine.offload_states] cannot be combined with zero_optimization.offload_param")
    to = DEVICES[place]
    if to is None:
        warnings.warn("[engine.offload_states] device 'none': nothing is moved", stacklevel=3)
        return
    core.offload_states(kinds, to, pin_memory)
