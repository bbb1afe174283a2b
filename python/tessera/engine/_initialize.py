"""tessera.initialize: the arguments of deepspeed.initialize, checked, to an Engine; our own by keyword only."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tessera import distributed
from tessera._config import choose_config
from tessera.engine._engine import Engine
from tessera.errors import ConfigError
from tessera.units import UnitPolicy
from tessera.zero._init import suspended


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: Any = None,
    *,
    unit_policy: UnitPolicy | None = None,
) -> tuple[Engine, torch.optim.Optimizer | None, Any, Any]:
    """Builds the engine. Returns (engine, optimizer, dataloader, lr_scheduler); the last three may be None.

    model: any nn.Module; it is changed in place (dtype, storage of its parameters). May be built inside zero.Init.
    optimizer: an Optimizer, or a callable that gets param groups; wins over config["optimizer"].
    model_parameters: what a configured or called optimizer trains; default: all that require gradients.
    config: dict, path or base64 text; also as args.deepspeed_config or config_params.
    unit_policy: which parameters travel together, see tessera.units; default: blocks that the model repeats.
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
    chosen = choose_config(args, config, config_params)
    _check_local_rank(args)
    distributed.prepare(dist_init_required, distributed_port)
    with suspended():
        engine = Engine(
            model,
            chosen,
            optimizer=optimizer,
            model_parameters=model_parameters,
            lr_scheduler=lr_scheduler,
            training_data=training_data,
            collate_fn=collate_fn,
            group=_data_parallel_group(mpu, mesh_param),
            unit_policy=unit_policy,
        )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _check_local_rank(args: Any) -> None:
    given = args.get("local_rank") if isinstance(args, dict) else getattr(args, "local_rank", None)
    if given is None:
        return
    if isinstance(given, bool) or not isinstance(given, int):
        raise ConfigError(f"[initialize] args.local_rank must be an integer, got {given!r}")
    if given >= 0 and "LOCAL_RANK" in os.environ and given != distributed.local_rank():
        raise ConfigError(
            f"[initialize] args.local_rank is {given}, but the environment says LOCAL_RANK={os.environ['LOCAL_RANK']}"
        )


def _data_parallel_group(mpu: Any, mesh_param: tuple[int, int] | None) -> Any:
    if mesh_param is not None and mesh_param[1] != 1:
        raise NotImplementedError(
            f"[initialize] mesh_param {tuple(mesh_param)}: sequence parallelism is not served by this "
            "version; use (ranks, 1)"
        )
    group = None
    if mpu is not None:
        for getter in ("get_model_parallel_world_size", "get_sequence_parallel_world_size"):
            if hasattr(mpu, getter) and getattr(mpu, getter)() != 1:
                raise NotImplementedError(f"[initialize] mpu.{getter}() is not 1, which this version does not serve")
        if hasattr(mpu, "get_data_parallel_group"):
            group = mpu.get_data_parallel_group()
    if mesh_param is not None and mesh_param[0] != distributed.core_group(group).size:
        raise ConfigError(
            f"[initialize] mesh_param asks for {mesh_param[0]} data-parallel ranks, there are "
            f"{distributed.core_group(group).size}"
        )
    return group
