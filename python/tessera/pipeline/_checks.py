"""What a pipeline refuses before it is built, and what its stages compare, as the core takes it (pipeline/alike.h)."""

from __future__ import annotations

import json
from typing import Any

import torch

from tessera import _core
from tessera.errors import ConfigError
from tessera.optim.engines import class_of, plain_values
from tessera.pipeline._grid import Everyone
from tessera.pipeline._module import PipelineModule


def check(model: Any, config: _core.Config, group: Any) -> None:
    if not isinstance(model, PipelineModule):
        raise ConfigError(f"[pipeline] the model must be a PipelineModule, got {type(model).__name__}")
    if group is not None:
        raise ConfigError("[pipeline] a pipeline lies over all processes; leave out the group")
    _core.check_pipeline(config, model.num_stages)


def check_alike(model: PipelineModule, config: _core.Config, everyone: Everyone) -> None:
    """What all stages must have alike. Collective."""
    parts = {"num_stages": model.num_stages, "num_chunks": model.num_chunks, "bounds of the parts": model.bounds}
    named = [(name, json.dumps(value)) for name, value in parts.items()]
    _core.check_alike(everyone.group, config, named, everyone.device)


def form_of(base: torch.optim.Optimizer) -> tuple[str, list[list[tuple[str, str]]]]:
    """What all stages must have alike of an optimizer."""
    groups = [plain_values(group) for group in base.param_groups]
    return class_of(base), [[(name, json.dumps(value)) for name, value in group.items()] for group in groups]


def check_ties(model: PipelineModule, config: _core.Config) -> None:
    tied = any(len(stages) > 1 and model.stage_id in stages for stages in model.tied_stages().values())
    _core.check_ties(config, tied)
