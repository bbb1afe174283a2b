"""deepspeed.utils.groups: the groups of the engine that was built last, for callers that ask without naming one."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

from tessera import _core

_last: list[Any] = [None, None]  # a weak reference to the engine, the mpu it was given


def register(engine: Any, mpu: Any) -> None:
    _last[:] = [weakref.ref(engine), mpu]


def forget(engine: Any) -> None:
    if _last[0] is not None and _last[0]() is engine:
        _last[:] = [None, None]


def _from_mpu(name: str) -> Any:
    mpu = _last[1]
    return getattr(mpu, name, None) if mpu is not None else None


def _engine() -> Any:
    return None if _last[0] is None else _last[0]()


def _mesh() -> Any:
    engine = _engine()
    return None if engine is None else engine.core.mesh()


def _group(axis: _core.Axis, getter: str) -> Any:
    """The torch group along an axis; the whole world where there is no engine."""
    own = _from_mpu(getter)
    if own is not None:
        return own()
    mesh = _mesh()
    if mesh is None or mesh.size(axis) == dist.get_world_size():
        return dist.group.WORLD
    from torch.distributed.distributed_c10d import _resolve_process_group as resolve  # type: ignore[attr-defined]

    if mesh.size(axis) == 1:
        return _alone()
    return resolve(mesh.group(axis).name)


_own_group: list[Any] = []


def _alone() -> Any:
    """A group of this process only. Collective over all processes, once."""
    if not _own_group:
        _own_group.append(dist.new_subgroups_by_enumeration([[rank] for rank in range(dist.get_world_size())])[0])
    return _own_group[0]


def _get_data_parallel_group() -> Any:
    return _group(_core.Axis.DpShard, "get_data_parallel_group")


def _get_data_parallel_world_size() -> int:
    mesh = _mesh()
    return dist.get_world_size(_get_data_parallel_group()) if mesh is None else mesh.batch_size()


def _get_data_parallel_rank() -> int:
    mesh = _mesh()
    return dist.get_rank(_get_data_parallel_group()) if mesh is None else mesh.batch_rank()


def _get_sequence_parallel_group() -> Any:
    mesh = _mesh()
    if mesh is None and _from_mpu("get_sequence_parallel_group") is None:
        return None
    return _group(_core.Axis.Sp, "get_sequence_parallel_group")


def _get_sequence_parallel_world_size() -> int:
    own = _from_mpu("get_sequence_parallel_world_size")
    mesh = _mesh()
    return own() if own is not None else (1 if mesh is None else mesh.size(_core.Axis.Sp))


def _get_sequence_parallel_rank() -> int:
    own = _from_mpu("get_sequence_parallel_rank")
    mesh = _mesh()
    return own() if own is not None else (0 if mesh is None else mesh.rank(_core.Axis.Sp))


def _get_tensor_model_parallel_group() -> Any:
    return _group(_core.Axis.Tp, "get_tensor_model_parallel_group")


def _get_model_parallel_world_size() -> int:
    mesh = _mesh()
    return 1 if mesh is None else mesh.size(_core.Axis.Tp)


def _get_model_parallel_rank() -> int:
    mesh = _mesh()
    return 0 if mesh is None else mesh.rank(_core.Axis.Tp)


_get_model_parallel_group = _get_tensor_model_parallel_group
get_tensor_model_parallel_group = _get_tensor_model_parallel_group
get_tensor_model_parallel_world_size = _get_model_parallel_world_size
get_tensor_model_parallel_rank = _get_model_parallel_rank
get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
_get_sequence_data_parallel_group = _get_data_parallel_group
