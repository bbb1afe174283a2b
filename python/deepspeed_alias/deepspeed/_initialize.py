"""deepspeed.initialize: its arguments as those of tessera.initialize."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from tessera.engine.front import load_config
from tessera.errors import ConfigError
from torch import nn

import deepspeed
import tessera
from deepspeed import _comm, _groups, _mpu, _sequence_state, _tensor_parallel
from deepspeed._config import read, translated
from deepspeed._engine import DeepSpeedEngine
from deepspeed._logging import logger
from deepspeed._pipe import PipelineEngine
from deepspeed._small import TORCH_DISTRIBUTED_DEFAULT_PORT
from tessera import distributed


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """tessera.initialize with a DeepSpeedEngine. Creates the process group of torch.distributed where there is none."""
    logger.info("DeepSpeed info: version=%s, served by Tessera %s", deepspeed.__version__, tessera.__version__)
    given = read(choose_config(args, config, config_params))
    mpu = _sequence_state.current() if mpu is _sequence_state else mpu
    with translated():
        settings = _tensor_parallel.handed_over(given, model)
        ranks: dict[str, Any] = {}
        if isinstance(model, nn.Module):  # else tessera.initialize says what is wrong
            settings = load_config(settings)
            _check_local_rank(argument(args, "local_rank"))
            _create_group(dist_init_required, distributed_port)
            record = _tensor_parallel.take_record(model, settings, mpu)
            group = _mpu.ranks_of(mpu, settings, mesh_param)
            if record is not None and record.group is not None:
                group = _mpu.order_of(record.group)
            ranks = {"group": group, "sequence_parallel": mesh_param[1] if mesh_param is not None else None}
            ranks["tensor_parallel"] = record.size if record is not None else None
        built = tessera.initialize(
            model,  # type: ignore[arg-type]  # None is refused there
            settings,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            collate_fn=collate_fn,
            engine_type=functools.partial(_class_for(model), given=given),
            **ranks,
        )
    vars(built[0])["_mpu"] = mpu
    _groups.register(built[0], mpu)
    return built


def argument(args: Any, name: str) -> Any:
    """Returns what `args`, a mapping or a namespace, has by that name; else None."""
    return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)


def choose_config(args: Any, config: Any, config_params: Any) -> Any:
    """The one configuration among `config`, its alias `config_params` and that of `args`, whose name may be the older
    one."""
    new, old = argument(args, "deepspeed_config"), argument(args, "deepscale_config")
    if new is not None and old is not None:
        raise ConfigError("[initialize] args has both deepspeed_config and its old name deepscale_config; keep one")
    from_args = new if new is not None else old
    if config is not None and config_params is not None and config is not config_params:
        raise ConfigError("[initialize] config and config_params are two names of one argument; pass one of them")
    config = config if config is not None else config_params
    if config is not None and from_args is not None:
        raise ConfigError("[initialize] both config and args.deepspeed_config are given; pass one of them")
    if config is None and from_args is None:
        raise ConfigError("[initialize] no configuration: pass config= (a dict or a path) or args.deepspeed_config")
    return config if config is not None else from_args


def _check_local_rank(given: Any) -> None:
    if given is None:
        return
    if isinstance(given, bool) or not isinstance(given, int):
        raise ConfigError(f"[initialize] args.local_rank must be an integer, got {given!r}")
    if given >= 0 and "LOCAL_RANK" in os.environ and given != distributed.local_rank():
        raise ConfigError(
            f"[initialize] args.local_rank is {given}, but the environment says LOCAL_RANK={os.environ['LOCAL_RANK']}"
        )


def _create_group(required: bool | None, port: int) -> None:
    if not dist.is_initialized():
        _comm.check_required(required)
        distributed.init_distributed(port=_comm.port_of(port))


def _class_for(model: Any) -> type[DeepSpeedEngine]:
    return PipelineEngine if isinstance(model, tessera.pipeline.PipelineModule) else DeepSpeedEngine
