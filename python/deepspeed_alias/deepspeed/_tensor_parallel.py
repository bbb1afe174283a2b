"""tp_model_init: recorded for the next initialize, which merges it into the configuration."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from tessera._config import load_config
from tessera.errors import ConfigError
from torch import nn

ROOT = __name__.split(".")[0]
_RECORD = "_TP_MODEL_INIT_ARGS"  # of the package: programs set it to None by hand
_training = True


def set_autotp_mode(training: bool = False) -> None:
    global _training
    _training = training


def is_autotp_training_mode() -> bool:
    return _training


def _recorded() -> dict[str, Any] | None:
    return sys.modules[ROOT].__dict__.get(_RECORD)


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, **kwargs: Any) -> nn.Module:
    """Returns the model as it is; the next initialize cuts it into `tp_size` slices."""
    group = kwargs.get("tp_group")
    if group is not None and dist.get_world_size(group) != tp_size:
        raise ConfigError(f"[tp_model_init] tp_group has {dist.get_world_size(group)} ranks, tp_size is {tp_size}")
    record = {"tp_size": tp_size, "dtype": dtype, "tp_group": group}
    before = _recorded()
    if before is not None:
        for key, value in record.items():
            was = before[key]
            same = (value is None) == (was is None) if key == "tp_group" else value == was
            if not same:
                raise ConfigError(f"[tp_model_init] Conflicting tp_model_init: {key} was {was}, now {value}")
    setattr(sys.modules[ROOT], _RECORD, record)
    return model


def merged(given: Any, mpu: Any) -> Any:
    """The configuration with what tp_model_init recorded, which is used up."""
    record = _recorded()
    if record is None:
        return given
    if record["tp_group"] is not None and mpu is not None:
        raise ConfigError("[initialize] tp_model_init provided tp_group, and an mpu is given too; keep one")
    section = given.get("tensor_parallel") if isinstance(given, Mapping) else None
    config = dict(given) if isinstance(given, Mapping) else load_config(given).to_dict()
    section = dict(section or {})
    size, configured = record["tp_size"], section.get("autotp_size") or 0
    if configured and configured != size:
        raise ConfigError(
            f"[initialize] Conflicting tensor_parallel.autotp_size: {configured}, tp_model_init said {size}"
        )
    inner = section.get("tp", section.get("tensor_parallel", {}))
    if not isinstance(inner, Mapping):
        raise ConfigError("[initialize] tensor_parallel.tp must be a dict")
    if inner.get("tp_size", size) != size:
        raise ConfigError(
            f"[initialize] Conflicting tensor_parallel.tp.tp_size: {inner['tp_size']}, tp_model_init said {size}"
        )
    if inner.get("tp_group", record["tp_group"]) is not record["tp_group"]:
        raise ConfigError("[initialize] tensor_parallel.tp.tp_group is another group than tp_model_init's")
    _check_dtype(config, section, record["dtype"])
    _check_group(record["tp_group"], size)
    setattr(sys.modules[ROOT], _RECORD, None)
    section["autotp_size"] = size
    return {**config, "tensor_parallel": section}


def _check_dtype(config: Mapping[str, Any], section: Mapping[str, Any], dtype: torch.dtype) -> None:
    for key, meant in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        part = config.get(key)
        if isinstance(part, Mapping) and part.get("enabled") is True and dtype != meant:
            raise ConfigError(f"[initialize] Conflicting dtype: {key} is enabled, tp_model_init said {dtype}")
    said = section.get("dtype")
    if said is not None and str(said).removeprefix("torch.") not in (
        str(dtype).removeprefix("torch."),
        _SHORT.get(dtype),
    ):
        raise ConfigError(f"[initialize] Conflicting tensor_parallel.dtype: {said}, tp_model_init said {dtype}")


_SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def _check_group(group: Any, size: int) -> None:
    """Groups are made of neighbours, `size` of them; another layout is not served."""
    if group is None:
        return
    ranks = dist.get_process_group_ranks(group)
    first = ranks[0] - ranks[0] % size
    if ranks != list(range(first, first + size)):
        raise NotImplementedError(
            f"[initialize] tp_model_init: a tp_group of the ranks {ranks}; tensor parallelism is over neighbours "
            f"({first} to {first + size - 1})"
        )
