"""tp_model_init: tensor parallelism that is asked for before the engine is built. It is noted on the model, and the
next tessera.initialize of that model takes the note off."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from tessera import _core
from tessera.errors import ConfigError

_RECORD = "_tessera_tp_model_init"  # of models: Record


@dataclasses.dataclass(frozen=True)
class Record:
    size: int
    dtype: torch.dtype
    group: Any = None  # of torch: the ranks that hold slices of one model


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, **kwargs: Any) -> nn.Module:
    """Asks for `tp_size` slices of `model`; returns it unchanged. `config` is that of tessera.initialize, which is
    where it counts: what is asked for here fills its gaps, and a contradiction is a ConfigError. `tp_group`: the ranks
    that hold the other slices."""
    group = kwargs.pop("tp_group", None)
    if kwargs:
        raise ConfigError(f"[tp_model_init] unknown: {', '.join(kwargs)}")
    vars(model)[_RECORD] = made(tp_size, dtype, group, vars(model).get(_RECORD))
    return model


def made(tp_size: int, dtype: torch.dtype, group: Any, before: Record | None) -> Record:
    """A record of what is asked for. ConfigError where it is wrong, or contradicts the one `before`."""
    if not isinstance(tp_size, int) or isinstance(tp_size, bool) or tp_size < 1:
        raise ConfigError(f"[tp_model_init] tp_size must be an integer of 1 or more, got {tp_size!r}")
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"[tp_model_init] dtype must be a torch.dtype, got {dtype!r}")
    if group is not None and _size(group) != tp_size:
        raise ConfigError(f"[tp_model_init] tp_group has {_size(group)} ranks, tp_size is {tp_size}")
    record = Record(tp_size, dtype, group)
    if before is not None and (
        (before.size, before.dtype, _size(before.group)) != (record.size, record.dtype, _size(record.group))
    ):
        raise ConfigError(f"[tp_model_init] Conflicting tp_model_init: {before}, then {record}")
    return record


def _size(group: Any) -> int:
    return 0 if group is None else int(group.size() if callable(group.size) else group.size)


def take_record(model: nn.Module, config: _core.Config, mpu: Any) -> Record | None:
    """What was asked for, checked against the configuration; it is gone from the model afterwards."""
    record: Record | None = vars(model).get(_RECORD)
    if record is None:
        return None
    if record.group is not None and mpu is not None:
        raise ConfigError("[initialize] tp_model_init provided tp_group, and mpu is given too; pass one of them")
    section = config.tensor_parallel
    for key, value, off in (("tp.tp_size", section.tp.tp_size, 1), ("autotp_size", section.autotp_size, 0)):
        if value not in (record.size, off):
            raise ConfigError(
                f"[initialize] Conflicting tensor_parallel.{key}: the configuration says {value}, tp_model_init said "
                f"{record.size}"
            )
    for key, part, dtype in (("bf16", config.bf16, torch.bfloat16), ("fp16", config.fp16, torch.float16)):
        if part.enabled and record.dtype != dtype:
            raise ConfigError(f"[initialize] Conflicting dtype: {key}.enabled, but tp_model_init said {record.dtype}")
    if "tensor_parallel.dtype" in config.given and section.dtype != record.dtype:
        raise ConfigError(
            f"[initialize] Conflicting tensor_parallel.dtype: the configuration says "
            f"{section.dtype}, tp_model_init said {record.dtype}"
        )
    del vars(model)[_RECORD]
    return record
