"""deepspeed.comm: torch.distributed, and the names that only DeepSpeed has."""

from __future__ import annotations

import datetime
import functools
import inspect
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from tessera import distributed


@functools.wraps(distributed.init_distributed)  # whose signature callers inspect
def init_distributed(*args: Any, **kwargs: Any) -> None:
    # DEEPSPEED_TIMEOUT (minutes) holds where no time-out is given.
    given = inspect.signature(distributed.init_distributed).bind(*args, **kwargs).arguments
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    if given.get("timeout") is None and minutes:
        given["timeout"] = datetime.timedelta(minutes=float(minutes))
    distributed.init_distributed(**given)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(dist, name)


def get_local_rank() -> int:
    return distributed.local_rank()


def get_world_group() -> Any:
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def inference_all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
    return dist.all_reduce(tensor, op=op, group=group)


def all_reduce_coalesced(tensors: Iterable[torch.Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor, op=op, group=group)


def reduce_scatter_fn(
    output_tensor: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False, **_: Any
) -> Any:
    return dist.reduce_scatter_tensor(output_tensor, tensor, group=group, async_op=async_op)


def allgather_fn(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False, **_: Any
) -> Any:
    return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", mesh_shape, mesh_dim_names=mesh_dim_names)


def configure(deepspeed_config: Any = None, enabled: bool | None = None, **_: Any) -> None:
    """Collectives are timed by the engine whose configuration asks for it, not by the process."""
    if enabled:
        raise NotImplementedError(
            "[deepspeed.comm] configure: set comms_logger.enabled in the configuration that the engine is built with"
        )


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Collectives of the engine that was built last, on this rank: with comms_logger.enabled their times by operation
    and message size ({op: {bytes: row}}, see Engine.comm_summary), else calls and bytes by operation."""
    from deepspeed import _groups
    from deepspeed._logging import logger
    from tessera import _core

    engine, mesh = _groups._engine(), _groups._mesh()
    found: dict[str, Any] = {}
    if engine is not None and engine._settings.get("comms_logger.enabled"):
        for row in engine.comm_summary(show_straggler):
            found.setdefault(row["op"], {})[row["bytes"]] = row
        return found if return_dict else None
    if mesh is not None:
        stats = mesh.group(_core.Axis.DpShard).stats()
        for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "barrier"):
            entry = getattr(stats, name)
            found[name] = {"calls": entry.calls, "bytes": entry.bytes}
    for name, entry in found.items():
        logger.info("[comm] %s: %d calls, %d bytes", name, entry["calls"], entry["bytes"])
    return found if return_dict else None
