"""deepspeed.comm: torch.distributed, with DeepSpeed's names of parameters where they differ, and the names that only
DeepSpeed has.

prof, log_name and debug of a collective choose among calls that DeepSpeed's logger times. Here the engine's own
collectives are timed, by the section comms_logger of its configuration; a program's calls are not, whatever they say.
"""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepspeed import _groups
from deepspeed._logging import logger
from deepspeed._small import TORCH_DISTRIBUTED_DEFAULT_PORT, timeout_of_environment
from tessera import _core, distributed

_DEFAULTS = {
    "op": dist.ReduceOp.SUM,
    "async_op": False,
    "prof": False,
    "wait_all_ranks": False,
    "tag": 0,
    "debug": None,
}
# Collective: its parameters in DeepSpeed's order. name=None: a default of None, name=0: of 0, name: of _DEFAULTS, where
# it has one. A parameter that torch calls otherwise is name:torch's.
_COLLECTIVES = {
    "broadcast": "tensor src group=None async_op prof log_name debug",
    "broadcast_object_list": "object_list src group=None device=None",
    "all_gather": "tensor_list tensor group=None async_op prof log_name debug",
    "all_gather_object": "object_list obj group=None prof log_name debug",
    "all_gather_into_tensor": "output_tensor tensor:input_tensor group=None async_op prof log_name debug",
    "reduce_scatter_tensor": "output_tensor:output tensor:input op group=None async_op prof log_name debug",
    "reduce_scatter": "output input_list op group=None async_op prof log_name debug",
    "reduce": "tensor dst op group=None async_op prof log_name debug",
    "all_reduce": "tensor op group=None async_op prof log_name debug",
    "all_to_all_single": "output tensor:input output_split_sizes=None input_split_sizes=None group=None async_op prof "
    "log_name debug",
    "all_to_all": "output_tensor_list input_tensor_list group=None async_op",
    "send": "tensor dst group=None tag prof log_name debug",
    "recv": "tensor src=None group=None tag prof log_name debug",
    "isend": "tensor dst group=None tag prof log_name debug",
    "irecv": "tensor src=None group=None tag prof log_name debug",
    "gather": "tensor gather_list=None dst=0 group=None async_op prof log_name debug",
    "scatter": "tensor scatter_list=None src=0 group=None async_op prof log_name debug",
    "barrier": "group=None async_op device_ids=None prof log_name debug",
    "monitored_barrier": "group=None timeout=None wait_all_ranks prof log_name debug",
}
_OF_THE_LOG = ("prof", "log_name", "debug")
# Names in newer versions of torch, which warns of the old ones.
_NEWER = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}


def _torchs(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(dist, _NEWER.get(name, name), None)
    return found if found is not None else getattr(dist, name)


def _collective(name: str, row: str) -> Callable[..., Any]:
    defaults = {**_DEFAULTS, "log_name": name}
    parameters, torchs = [], {}
    for word in row.split():
        word, _, default = word.partition("=")
        word, _, renamed = word.partition(":")
        torchs[word] = renamed or word
        value = {"": defaults.get(word, inspect.Parameter.empty), "None": None, "0": 0}[default]
        parameters.append(inspect.Parameter(word, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value))
    signature = inspect.Signature(parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        passed = {torchs[key]: value for key, value in given.items() if key not in _OF_THE_LOG}
        return _torchs(name)(**passed)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"torch.distributed.{name}()."
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


globals().update({name: _collective(name, row) for name, row in _COLLECTIVES.items()})


class _Works:
    """The works of several collectives as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _coalesced(works: Sequence[Any], async_op: bool) -> _Works | None:
    both = _Works(works)
    if async_op:
        return both
    both.wait()
    return None


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """tessera.init_distributed. DEEPSPEED_TIMEOUT (minutes) holds where no time-out is given; `verbose` and `config`
    are not read. `distributed_port`, unless 29500, wins over the port of a job."""
    timeout = timeout_of_environment() if timeout is None else timeout
    check_required(dist_init_required)
    port = port_of(distributed_port)
    distributed.init_distributed(
        dist_backend, init_method, timeout, world_size, rank, other_launchers=auto_mpi_discovery, port=port
    )


def check_required(dist_init_required: bool | None) -> None:
    """RuntimeError where the caller has said that there is a process group, and there is none."""
    if dist_init_required is False and not dist.is_initialized():
        raise RuntimeError(
            "[init_distributed] dist_init_required is False, but there is no process group yet; call "
            "torch.distributed.init_process_group first"
        )


def port_of(distributed_port: int) -> int:
    """The port as tessera.init_distributed takes it: the default leaves the choice to the environment."""
    return 0 if distributed_port == TORCH_DISTRIBUTED_DEFAULT_PORT else distributed_port


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(dist, name)


def get_local_rank() -> int:
    return distributed.local_rank()


get_local_rank_from_launcher = get_local_rank


def get_world_rank_from_launcher() -> int:
    return distributed.launched(rendezvous=False).rank


def get_world_size_from_launcher() -> int:
    return distributed.launched(rendezvous=False).size


def get_world_group() -> Any:
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    return get_all_ranks_from_group(group)[group_rank] if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def _has() -> bool:
    """Torch has it in every version that Tessera runs with."""
    return True


has_reduce_scatter_tensor = has_all_gather_into_tensor = has_all_reduce_coalesced = has_coalescing_manager = _has


def inference_all_reduce(
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: Any = None,
) -> torch.Tensor | None:
    """Reduces in place; done at the return, also with `async_op`. A group of one gives the tensor back."""
    return tensor if dist.get_world_size(group) <= 1 else dist.all_reduce(tensor, op=op, group=group)


def all_reduce_coalesced(
    tensors: Iterable[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: Any = None,
) -> _Works | None:
    return _coalesced([dist.all_reduce(tensor, op=op, group=group, async_op=True) for tensor in tensors], async_op)


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> _Works | None:
    pairs = zip(output_tensors, input_tensors, strict=True)
    gather = _torchs("all_gather_into_tensor")
    works = [gather(output, own, group=group, async_op=True) for output, own in pairs]
    return _coalesced(works, async_op)


def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    debug: Any = None,
) -> Any:
    return _torchs("reduce_scatter_tensor")(output_tensor, tensor, op=op, group=group, async_op=async_op)


def allgather_fn(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
    debug: Any = None,
) -> Any:
    return _torchs("all_gather_into_tensor")(output_tensor, input_tensor, group=group, async_op=async_op)


def enable_symm_mem_for_group(group_name: str) -> None:
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group as enable

    enable(group_name)  # type: ignore[arg-type]  # a text by another name


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", mesh_shape, mesh_dim_names=mesh_dim_names)


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Collectives are timed by the engine whose configuration asks for it, not by the process."""
    if any((enabled, prof_all, prof_ops, verbose, debug)):
        raise NotImplementedError(
            "[deepspeed.comm] configure: set comms_logger.enabled in the configuration that the engine is built with"
        )


def _timed_engine() -> Any:
    """The engine that was built last, where its configuration has comms_logger.enabled; else None."""
    engine = _groups._engine()
    return engine if engine is not None and engine.timed_calls is not None else None


def _totals() -> list[Any]:
    engine = _timed_engine()
    return [] if engine is None else engine.timed_calls.totals()


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Collectives of the engine that was built last, on this rank. summary: with comms_logger.enabled their times, by
    operation and bytes of the message; straggler_analysis: with `show_straggler` the part of these that this rank
    waited for the last one (collective then); metadata; counts: calls and bytes by operation, with or without it."""
    engine, mesh = _timed_engine(), _groups._mesh()
    rows = engine.comm_summary(show_straggler) if engine is not None else []
    counts = _counts(mesh.group(_core.Axis.DpShard).stats()) if mesh is not None else {}
    for name, entry in counts.items() if engine is None else []:
        logger.info("[comm] %s: %d calls, %d bytes", name, entry["calls"], entry["bytes"])
    if not return_dict:
        return None
    found: dict[str, Any] = {"summary": _by_size(rows, _TIMES), "counts": counts}
    found["straggler_analysis"] = _by_size(rows, _WAITS) if show_straggler else None
    there = dist.is_initialized()
    found["metadata"] = {
        "world_size": dist.get_world_size() if there else 1,
        "rank": dist.get_rank() if there else 0,
        "timestamp": datetime.datetime.now().isoformat(),
    }
    return found


def _counts(stats: Any) -> dict[str, dict[str, int]]:
    names = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "barrier")
    return {name: {"calls": getattr(stats, name).calls, "bytes": getattr(stats, name).bytes} for name in names}


_TIMES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "count": lambda row: row["calls"],
    "total_latency_ms": lambda row: row["total_ms"],
    "avg_latency_ms": lambda row: row["average_ms"],
    "tput_avg_gbps": lambda row: row["algbw_gbps"],
    "busbw_avg_gbps": lambda row: row["busbw_gbps"],
    "msg_size_bytes": lambda row: row["bytes"],
    "msg_size_str": lambda row: _size_text(row["bytes"]),
}
_WAITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "count": lambda row: row["calls"],
    "total_comm_lat_ms": lambda row: row["total_ms"] - row["straggler_ms"],
    "total_straggler_ms": lambda row: row["straggler_ms"],
    "avg_comm_lat_ms": lambda row: (row["total_ms"] - row["straggler_ms"]) / row["calls"],
    "avg_straggler_ms": lambda row: row["straggler_ms"] / row["calls"],
    "msg_size_bytes": lambda row: row["bytes"],
    "msg_size_str": lambda row: _size_text(row["bytes"]),
}


def _by_size(rows: list[dict[str, Any]], columns: dict[str, Callable[[dict[str, Any]], Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row in rows:
        found.setdefault(row["op"], {})[row["bytes"]] = {name: of(row) for name, of in columns.items()}
    return found


def _size_text(size: float) -> str:
    units = ["B", "KB", "MB", "GB", "TB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{round(size, 2)} {units[0]}"


def reset_log() -> None:
    """Forgets the times so far."""
    engine = _timed_engine()
    if engine is not None:
        engine.timed_calls.reset()


def has_comm_data() -> bool:
    return bool(_totals())


def get_comm_operation_count() -> int:
    return sum(total.calls for total in _totals())


def get_logged_comm_ops() -> list[str]:
    return sorted({total.op for total in _totals()})
