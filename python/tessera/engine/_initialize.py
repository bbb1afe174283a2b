"""tessera.initialize: the arguments of deepspeed.initialize, checked, to an Engine; our own by keyword only."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tessera import _core, _mesh, distributed
from tessera._config import choose_config, load_config
from tessera.engine._engine import Engine
from tessera.errors import ConfigError
from tessera.parallel.engines import take_record
from tessera.units import UnitPolicy
from tessera.zero.engines import suspended


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
    engine_type: Callable[..., Any] | None = None,
) -> tuple[Engine, torch.optim.Optimizer | None, Any, Any]:
    """Builds the engine. Returns (engine, optimizer, dataloader, lr_scheduler); the last three may be None.

    model: any nn.Module; it is changed in place (dtype, storage of its parameters). May be built inside zero.Init.
    optimizer: an Optimizer, or a callable that gets param groups; wins over config["optimizer"].
    model_parameters: what a configured or called optimizer trains; default: all that require gradients.
    config: dict, path or base64 text; also as args.deepspeed_config or config_params.
    unit_policy: which parameters travel together, see tessera.units; default: blocks that the model repeats.
    engine_type: Engine, or what makes one, or an object that has one, of its arguments; default: what the model names
        (a PipelineModule a PipelineEngine), else Engine.
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
    loaded = load_config(choose_config(args, config, config_params))
    _check_local_rank(args)
    distributed.prepare(dist_init_required, distributed_port)
    record = take_record(model, loaded, mpu)
    ranks = _ranks(loaded, mpu, mesh_param)
    if record is not None and record.group is not None:
        ranks = _mesh.order_of(record.group)
    with suspended():
        build: Any = engine_type or getattr(model, "_tessera_engine", Engine)
        engine = build(
            model,
            loaded,
            optimizer=optimizer,
            model_parameters=model_parameters,
            lr_scheduler=lr_scheduler,
            training_data=training_data,
            collate_fn=collate_fn,
            group=ranks,
            sequence_parallel=mesh_param[1] if mesh_param is not None else None,
            tensor_parallel=record.size if record is not None else None,
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


# What an mpu may offer -> the axes of the group.
_MPU_GROUPS = (
    ("get_data_parallel_group", [_core.Axis.DpShard]),
    ("get_sequence_parallel_group", [_core.Axis.Sp]),
    ("get_tensor_model_parallel_group", [_core.Axis.Tp]),
    ("get_sequence_data_parallel_group", [_core.Axis.DpShard, _core.Axis.Sp]),
)


def _ranks(config: _core.Config, mpu: Any, mesh_param: tuple[int, int] | None) -> Any:
    """The ranks as Engine takes them (`group`), of what initialize() was given."""
    if mpu is not None and _offered(mpu, "get_pipeline_model_parallel_world_size") > 1:
        raise NotImplementedError("[initialize] mpu: pipeline parallelism inside one engine is not served")
    if mpu is None or not hasattr(mpu, "get_data_parallel_group"):
        _check_mesh_param(config, mesh_param)
        return None
    tensor = max(_offered(mpu, "get_tensor_model_parallel_world_size"), _offered(mpu, "get_model_parallel_world_size"))
    sequence = _offered(mpu, "get_sequence_parallel_world_size")
    if tensor > 1 and not hasattr(mpu, "get_tensor_model_parallel_group"):
        mpu = _Renamed(mpu)
    if tensor == 1 and sequence == 1:  # slices of a model or a sequence come from the configuration, over all ranks
        cut = max(1, config.tensor_parallel.autotp_size) * config.sequence_parallel_size > 1
        group = None if cut else mpu.get_data_parallel_group()
        _check_mesh_param(config, mesh_param, group)
        return group
    wanted = config.tensor_parallel.autotp_size
    if tensor == 1 and wanted > 1:
        raise ConfigError(
            f"[initialize] tensor_parallel.autotp_size is {wanted}, and mpu has sequence-parallel groups without "
            "tensor-parallel ones; register_with_transformers and initialize_sequence_parallel make both where they "
            f"get tensor_parallel_size={wanted}"
        )
    mesh = _core.Mesh()
    for getter, axes in _MPU_GROUPS:
        if not hasattr(mpu, getter) or (len(axes) > 1 and (sequence == 1 or mesh.batch_size() == 1)):
            continue
        mesh.set(axes, _mesh.core_group(getattr(mpu, getter)()))
    _check_mesh_param(config, mesh_param, mesh.size(list(_core.Axis.__members__.values())))
    return mesh


class _Renamed:
    """An mpu whose model-parallel group is the tensor-parallel one, as without pipelines."""

    def __init__(self, mpu: Any) -> None:
        self._mpu = mpu
        self.get_tensor_model_parallel_group = mpu.get_model_parallel_group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mpu, name)


def _offered(mpu: Any, getter: str) -> int:
    return int(getattr(mpu, getter)()) if hasattr(mpu, getter) else 1


def _check_mesh_param(config: _core.Config, mesh_param: tuple[int, int] | None, ranks: Any = None) -> None:
    """`ranks`: a group, or how many there are; None: all."""
    if mesh_param is None:
        return
    world = ranks if isinstance(ranks, int) else _mesh.core_group(ranks).size
    data, sequence = mesh_param
    tensor = max(1, config.tensor_parallel.autotp_size)
    if data * sequence * tensor != world:
        raise ConfigError(
            f"[initialize] mesh_param asks for {data} data-parallel x {sequence} sequence-parallel ranks, times "
            f"tensor_parallel.autotp_size {tensor}; there are {world} ranks"
        )
    configured = config.sequence_parallel_size
    if configured not in (1, sequence):
        raise ConfigError(
            f"[initialize] mesh_param has {sequence} sequence-parallel ranks, sequence_parallel_size is {configured}"
        )
