"""tessera.initialize: its arguments, checked, to an Engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.optim.optimizer import ParamsT
from torch.utils.data import Dataset

from tessera import _mesh, distributed
from tessera._config import ConfigLike, load_config
from tessera._former import of_initialize, takes_former
from tessera.data import Collate, Indexed, Loader
from tessera.engine._engine import Engine
from tessera.engine.program import engine_class
from tessera.errors import ConfigError
from tessera.lr_schedules import Scheduler
from tessera.optim.engines import MakesOptimizer, MakesScheduler
from tessera.sequence import SequenceParallelGroups
from tessera.units import UnitPolicy
from tessera.zero.engines import suspended

E = TypeVar("E")


@overload
def initialize(
    model: nn.Module,
    config: ConfigLike,
    *,
    optimizer: torch.optim.Optimizer | MakesOptimizer | None = None,
    model_parameters: ParamsT | None = None,
    training_data: Dataset[object] | Indexed[object],
    lr_scheduler: Scheduler | MakesScheduler | None = None,
    collate_fn: Collate | None = None,
    group: _mesh.Ranks | SequenceParallelGroups | None = None,
    sequence_parallel: int | None = None,
    tensor_parallel: int | None = None,
    unit_policy: UnitPolicy | None = None,
    engine_type: None = None,
) -> tuple[Engine, torch.optim.Optimizer | None, Loader, Scheduler | None]: ...
@overload
def initialize(
    model: nn.Module,
    config: ConfigLike,
    *,
    optimizer: torch.optim.Optimizer | MakesOptimizer | None = None,
    model_parameters: ParamsT | None = None,
    training_data: None = None,
    lr_scheduler: Scheduler | MakesScheduler | None = None,
    collate_fn: Collate | None = None,
    group: _mesh.Ranks | SequenceParallelGroups | None = None,
    sequence_parallel: int | None = None,
    tensor_parallel: int | None = None,
    unit_policy: UnitPolicy | None = None,
    engine_type: None = None,
) -> tuple[Engine, torch.optim.Optimizer | None, None, Scheduler | None]: ...
@overload
def initialize(
    model: nn.Module,
    config: ConfigLike,
    *,
    optimizer: torch.optim.Optimizer | MakesOptimizer | None = None,
    model_parameters: ParamsT | None = None,
    training_data: Dataset[object] | Indexed[object] | None = None,
    lr_scheduler: Scheduler | MakesScheduler | None = None,
    collate_fn: Collate | None = None,
    group: _mesh.Ranks | SequenceParallelGroups | None = None,
    sequence_parallel: int | None = None,
    tensor_parallel: int | None = None,
    unit_policy: UnitPolicy | None = None,
    engine_type: Callable[..., E],
) -> tuple[E, torch.optim.Optimizer | None, Loader | None, Scheduler | None]: ...
@takes_former(of_initialize)
def initialize(
    model: nn.Module | None = None,
    config: ConfigLike | None = None,
    *,
    optimizer: torch.optim.Optimizer | MakesOptimizer | None = None,
    model_parameters: ParamsT | None = None,
    training_data: Dataset[object] | Indexed[object] | None = None,
    lr_scheduler: Scheduler | MakesScheduler | None = None,
    collate_fn: Collate | None = None,
    group: _mesh.Ranks | SequenceParallelGroups | None = None,
    sequence_parallel: int | None = None,
    tensor_parallel: int | None = None,
    unit_policy: UnitPolicy | None = None,
    engine_type: Callable[..., object] | None = None,
) -> tuple[Any, torch.optim.Optimizer | None, Loader | None, Scheduler | None]:
    """Builds the engine. Returns (engine, optimizer, dataloader, lr_scheduler); the last three may be None.

    model: any nn.Module; it is changed in place (dtype, storage of its parameters). May be built inside zero.Init.
    config: dict, path, JSON or base64 text.
    optimizer: an Optimizer, or a callable that gets param groups; wins over config["optimizer"].
    model_parameters: parameters that a configured or called optimizer trains; default: all that require gradients.
    group, sequence_parallel, tensor_parallel: the ranks, as Engine takes them; default: all processes, for which the
        default process group is created where several were started and there is none.
    unit_policy: which parameters travel together, see tessera.units; default: blocks that the model repeats.
    engine_type: Engine, or what makes one, or an object that has one, of its arguments; default: the class that the
        model names (a PipelineModule a PipelineEngine), else Engine.
    The returned optimizer is the client's own object at stage 0 in fp32, else a tessera.Optimizer.
    A plain model on the CPU is moved to the accelerator that the process group has a back end of its own for, as NCCL.
    Collective over all ranks. ConfigError (a ValueError) for wrong arguments.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "[initialize] model is required"
            if model is None
            else f"[initialize] model must be a torch.nn.Module, got {type(model).__name__}"
        )
    if isinstance(model, Engine):
        raise ConfigError("[initialize] model is an engine already; hand over its module after destroy() of the engine")
    if config is None:
        raise ConfigError("[initialize] no configuration: pass config= (a dict or a path)")
    build: Any = engine_type or engine_class(model) or Engine
    if build is Engine:  # others agree on what is wrong with it
        config = load_config(config)
    distributed.prepare()
    with suspended():
        engine = build(
            model,
            config,
            optimizer=optimizer,
            model_parameters=model_parameters,
            lr_scheduler=lr_scheduler,
            training_data=training_data,
            collate_fn=collate_fn,
            group=group,
            sequence_parallel=sequence_parallel,
            tensor_parallel=tensor_parallel,
            unit_policy=unit_policy,
        )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler
