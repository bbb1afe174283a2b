"""deepspeed.runtime.tensor_parallel: the section `tensor_parallel` as objects, and configurations read by hand."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import torch

from deepspeed._config import Section, users_dict


class AUTOTP_MODE(enum.Enum):
    TRAINING = "TRAINING"
    INFERENCE = "INFERENCE"


class TPConfig(Section):
    def __init__(self, **values: Any) -> None:
        whole = TPTrainingConfig(autotp_size=values.get("tp_size", 1), tp=values)
        self._fill(whole._values["tp"], values)


class TPTrainingConfig(Section):
    _path = ("tensor_parallel",)

    def _fill(self, tree: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        super()._fill(tree, given)
        self.tensor_parallel = TPConfig._of(tree["tp"], given.get("tp") or {})
        self.tp = self.tensor_parallel


def get_tensor_parallel_config(ds_config: Mapping[str, Any]) -> TPTrainingConfig:
    return TPTrainingConfig(**ds_config.get("tensor_parallel", {}))


def load_ds_config(config: Any) -> dict[str, Any]:
    """Loads a dict, the path of a file, or base64 text."""
    return users_dict(config)


def infer_config_dtype(config_dict: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype of the section that is enabled."""
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        section = config_dict.get(name)
        if isinstance(section, Mapping) and section.get("enabled"):
            return dtype
    return None
