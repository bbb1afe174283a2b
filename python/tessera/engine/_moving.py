"""Moves what an engine has on its device elsewhere for a while: arguments of offload_states()."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

import torch

from tessera import _core
from tessera.errors import ConfigError

KINDS = {
    "optim_states": _core.StateKind.OptimizerStates,
    "hp_params": _core.StateKind.Masters,
    "lp_params": _core.StateKind.Weights,
    "lp_grads": _core.StateKind.Gradients,
    "contiguous_grad_buffer": _core.StateKind.Buckets,
}
DEVICES = {"none": None, "cpu": _core.Residence.Host, "nvme": _core.Residence.Nvme}


def _name(value: object) -> str:
    return str(getattr(value, "value", value))  # members of enums too


def kinds_of(include: Iterable[str | Enum] | None) -> list[_core.StateKind]:
    if include is None:
        return list(KINDS.values())
    names = [_name(kind) for kind in ([include] if isinstance(include, str) else include)]
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise ConfigError(f"[engine.offload_states] include: no such states: {unknown}; there are {list(KINDS)}")
    return [KINDS[name] for name in dict.fromkeys(names)]


class Moving:
    """`warn`: shows warnings."""

    def __init__(self, core: _core.Engine, warn: Callable[[list[str]], None]) -> None:
        self._core, self._warn_user = core, warn

    def offload_states(
        self,
        include: Iterable[str | Enum] | None = None,
        device: str | torch.device | Enum = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Makes room for other engines: what this one has on its device goes elsewhere until reload_states(), see
        docs/offload.md. Done on return, also with `non_blocking`. Local."""
        kinds, place = kinds_of(include), _name(device)
        if place not in DEVICES:
            raise ConfigError(f"[engine.offload_states] device must be one of {list(DEVICES)}, got '{place}'")
        to = DEVICES[place]
        if to is None:
            self._warn_user(["[engine.offload_states] device 'none': nothing is moved"])
            return
        self._core.offload_states(kinds, to, pin_memory)

    def finish_update(self) -> None:
        """With tessera.update_runs_on: returns once the last update has come to its end, on all ranks. For who reads
        or writes parameters of the module itself between the update and the next forward; the engine's own ways of
        doing so (zero.GatheredParameters, module_state_dict(), checkpoints, tessera.state) wait by themselves, and so
        do forwards without gradients. IoError, on all ranks, where a disk failed. Collective."""
        self._core.finish_update()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Brings back what offload_states() took away; nothing to do where nothing is. Local; done on return."""
        self._core.reload_states()
