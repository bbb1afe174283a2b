"""Tessera: trains PyTorch models with sharded model states, driven by a DeepSpeed-style configuration.

engine, optimizer, loader, schedule = tessera.initialize(model=model, config="config.json")
for x, y in loader:
    loss = engine(x, y)
    loss.backward()
    engine.step()
"""

from __future__ import annotations

import os

import torch

from tessera._version import check_torch

check_torch(torch.__version__)

from tessera import (  # noqa: E402
    autocast,
    data,
    flops,
    hybrid,
    lr_schedules,
    monitor,
    optim,
    parallel,
    pipeline,
    recompute,
    sequence,
    state,
    zero,
)
from tessera._core import Axis, Config, Group, Mesh, c10d_group, single_group, thread_groups  # noqa: E402
from tessera._core import version as __version__  # noqa: E402
from tessera.distributed import init_distributed  # noqa: E402
from tessera.engine import Engine, cast_inputs, initialize, step_together  # noqa: E402
from tessera.errors import ConfigError, UsageError  # noqa: E402
from tessera.optim.engines import Optimizer  # noqa: E402
from tessera.units import default_unit_policy  # noqa: E402

cmake_prefix_path = os.path.dirname(os.path.abspath(__file__))
"""The prefix where CMake's find_package(Tessera) finds this package's library and headers."""

__all__ = [
    "Axis",
    "Config",
    "ConfigError",
    "Engine",
    "Group",
    "Mesh",
    "Optimizer",
    "UsageError",
    "__version__",
    "autocast",
    "c10d_group",
    "cast_inputs",
    "cmake_prefix_path",
    "data",
    "default_unit_policy",
    "flops",
    "hybrid",
    "init_distributed",
    "initialize",
    "lr_schedules",
    "monitor",
    "optim",
    "parallel",
    "pipeline",
    "recompute",
    "sequence",
    "single_group",
    "state",
    "step_together",
    "thread_groups",
    "zero",
]
