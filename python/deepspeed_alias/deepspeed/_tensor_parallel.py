"""tp_model_init: recorded for the process, until the next initialize hands it to the model that it is given."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from tessera.errors import ConfigError
from tessera.parallel._record import Record, made
from torch import nn

from tessera import parallel

ROOT = __name__.split(".")[0]
_RECORD = "_TP_MODEL_INIT_ARGS"  # of the package: programs set it to None by hand
_training = True


def set_autotp_mode(training: bool = False) -> None:
    global _training
    _training = training


def is_autotp_training_mode() -> bool:
    return _training


def _recorded() -> Record | None:
    found: dict[str, Any] | None = sys.modules[ROOT].__dict__.get(_RECORD)
    return None if found is None else Record(found["tp_size"], found["dtype"], found["tp_group"])


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, **kwargs: Any) -> nn.Module:
    """Returns the model as it is; the next initialize cuts it into `tp_size` slices."""
    record = made(tp_size, dtype, kwargs.get("tp_group"), _recorded())
    setattr(sys.modules[ROOT], _RECORD, {"tp_size": record.size, "dtype": record.dtype, "tp_group": record.group})
    return model


def handed_over(given: Any, model: nn.Module | None) -> Any:
    """What was recorded is noted on the model, where tessera.initialize compares it with the configuration, and is used
    up. Returns the configuration without the group that only this package knows, with both sizes where it has one."""
    record = _recorded()
    if record is None or model is None:
        return given
    section = given.get("tensor_parallel") if isinstance(given, Mapping) else None
    inner = (section or {}).get("tp", (section or {}).get("tensor_parallel", {}))
    if not isinstance(inner, Mapping):
        raise ConfigError("[initialize] tensor_parallel.tp must be a dict")
    if inner.get("tp_group", record.group) is not record.group:
        raise ConfigError("[initialize] tensor_parallel.tp.tp_group is another group than tp_model_init's")
    setattr(sys.modules[ROOT], _RECORD, None)
    parallel.tp_model_init(model, record.size, record.dtype, tp_group=record.group)
    if not inner:
        return given
    assert section is not None
    tp = {key: value for key, value in inner.items() if key != "tp_group"}
    size = section.get("autotp_size") or tp.get("tp_size", 0)
    return {**given, "tensor_parallel": {**section, "tp": tp, "autotp_size": size}}
