"""Tensor parallelism: a model's weights cut over the ranks of a group, without a change of the model.

tessera.initialize does it where the configuration says tensor_parallel.autotp_size; see docs/tensor_parallel.md. Here
is what can be done before: shard_model() and load_slices(), for models that no rank can hold whole; column_linear() and
row_linear(), for layers that a program cuts itself; register_class(), for what weights do not say of a class. And
afterwards: WholeSlices.
"""

from __future__ import annotations

import torch
from torch import nn

from tessera import _core, _mesh
from tessera._config import ConfigLike, load_config
from tessera._device import group_device
from tessera.errors import ConfigError
from tessera.parallel._apply import Cutter, plan_of
from tessera.parallel._classes import register_class
from tessera.parallel._cost import cost
from tessera.parallel._hand import WholeSlices, column_linear, row_linear
from tessera.parallel._load import load_slices
from tessera.parallel._modules import (
    ColumnLinear,
    CutEmbedding,
    RowLinear,
    SharedTailLinear,
    VocabEmbedding,
)
from tessera.parallel._plan import ParallelPlan, make_plan

__all__ = [
    "ColumnLinear",
    "CutEmbedding",
    "ParallelPlan",
    "RowLinear",
    "SharedTailLinear",
    "VocabEmbedding",
    "WholeSlices",
    "column_linear",
    "cost",
    "is_model_parallel_parameter",
    "load_slices",
    "plan_for",
    "register_class",
    "row_linear",
    "shard_model",
]


def plan_for(model: nn.Module, config: ConfigLike) -> ParallelPlan:
    """How tensor_parallel of `config` would cut `model`; nothing is changed. Local."""
    loaded = load_config(config)
    return make_plan(model, loaded, max(1, loaded.tensor_parallel.autotp_size))


def shard_model(model: nn.Module, config: ConfigLike, *, group: _mesh.OneGroup | None = None) -> ParallelPlan:
    """Cuts `model` in place as `config` says, as tessera.initialize would, which takes the model as it is then.

    Parameters of the meta device only change their sizes; load_slices() fills them. Else the first rank's values hold.
    `group`: the ranks that hold slices of one model (a torch ProcessGroup or a group of tessera); default: as
    tessera.initialize lays out all processes. Collective."""
    loaded = load_config(config)
    if plan_of(model) is not None:
        raise ConfigError("[shard_model] the model is cut already")
    made = _mesh.OwnGroups()
    if group is not None:
        ranks = _mesh.core_group(group)
    else:
        mesh, made = _mesh.core_mesh(None, **_mesh.mesh_sizes(loaded), device=group_device(None))
        ranks = mesh.group(_core.Axis.Tp)
    try:
        plan = make_plan(model, loaded, ranks.size)
        cutter = Cutter(model, plan, ranks, overlap=_core.overlaps_tensor_parallel(loaded))
        cutter.run()
        if made:  # the groups end here; the engine brings its own
            cutter.ranks.bind(None)
    finally:
        _mesh.discard(made)
    return plan


def is_model_parallel_parameter(param: torch.Tensor) -> bool:
    """Whether this rank's `param` is a slice, of a model that is cut."""
    return bool(getattr(param, "tensor_model_parallel", False))
