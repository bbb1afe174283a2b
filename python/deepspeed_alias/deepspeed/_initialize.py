"""deepspeed.initialize."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from tessera.engine.front import argument, choose_config
from tessera.errors import ConfigError

import deepspeed
import tessera
from deepspeed import _groups, _sequence_state, _tensor_parallel
from deepspeed._config import read, translated
from deepspeed._engine import DeepSpeedEngine
from deepspeed._logging import logger
from deepspeed._pipe import PipelineEngine


def _arguments() -> inspect.Signature:
    """Those of tessera.initialize that DeepSpeed has too: the positional ones."""
    whole = inspect.signature(tessera.initialize)
    return whole.replace(parameters=[p for p in whole.parameters.values() if p.kind is not p.KEYWORD_ONLY])


_ARGUMENTS = _arguments()


def initialize(*args: Any, **kwargs: Any) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """tessera.initialize with a DeepSpeedEngine. Creates the process group of torch.distributed where there is none."""
    logger.info("DeepSpeed info: version=%s, served by Tessera %s", deepspeed.__version__, tessera.__version__)
    call = _ARGUMENTS.bind(*args, **kwargs).arguments
    args_config = {"deepspeed_config": _config_of(call.get("args"))}
    given = read(choose_config(args_config, call.get("config"), call.pop("config_params", None)))
    call["args"] = {"local_rank": argument(call.get("args"), "local_rank")}
    if call.get("dist_init_required") is None:
        call["dist_init_required"] = True
    if call.get("mpu") is _sequence_state:
        call["mpu"] = _sequence_state.current()
    with translated():
        call["config"] = _tensor_parallel.handed_over(given, call.get("model"))
        built = tessera.initialize(**call, engine_type=functools.partial(_class_for(call.get("model")), given=given))
    vars(built[0])["_mpu"] = call.get("mpu")
    _groups.register(built[0], call.get("mpu"))
    return built  # type: ignore[return-value]


def _config_of(args: Any) -> Any:
    """What `args` names, by the newer or the older name."""
    new, old = argument(args, "deepspeed_config"), argument(args, "deepscale_config")
    if new is not None and old is not None:
        raise ConfigError("[initialize] args has both deepspeed_config and its old name deepscale_config; keep one")
    return new if new is not None else old


def _class_for(model: Any) -> type[DeepSpeedEngine]:
    return PipelineEngine if isinstance(model, tessera.pipeline.PipelineModule) else DeepSpeedEngine


initialize.__signature__ = _ARGUMENTS  # type: ignore[attr-defined]
