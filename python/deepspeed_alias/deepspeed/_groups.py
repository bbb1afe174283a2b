"""deepspeed.utils.groups: the groups of the engine that was built last, for callers that ask without naming one."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from tessera.errors import ConfigError

from deepspeed._lazy import NotServed
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
    return group_of(_engine(), axis, getter, _last[1])


def group_of(engine: Any, axis: _core.Axis, getter: str, mpu: Any) -> Any:
    """The group that `mpu` has; None where the groups of the engine are not torch's."""
    if mpu is not None and hasattr(mpu, getter):
        return getattr(mpu, getter)()
    if engine is None:
        return _made_early().get(axis, dist.group.WORLD)
    mesh = engine.core.mesh()
    if mesh.size(axis) == dist.get_world_size():
        return dist.group.WORLD
    return _alone() if mesh.size(axis) == 1 else engine.process_group(_core.Axes(axis).name)


_own_group: list[Any] = [None, None]  # the world that it is of, and the group


_early: list[Any] = [None, {}]  # the world that they are of, and groups by axis: before there is an engine


def _made_early() -> dict[_core.Axis, Any]:
    if _early[0] is not dist.group.WORLD:
        _early[:] = [dist.group.WORLD, {}]
    return _early[1]


def _init_tp_mesh_device(tensor_model_parallel_size: int = 1, data_parallel_size: int | None = None) -> Any:
    """Groups of ranks that follow one another, for slices of a model, and those across them: what the getters give as
    long as no engine is built. Returns (data-parallel group, tensor-parallel group). Collective over all processes."""
    early, world = _made_early(), dist.get_world_size()
    if not early:
        size = tensor_model_parallel_size
        if size < 1 or world % size or data_parallel_size not in (None, world // size):
            raise ConfigError(
                f"[groups] {size} tensor-parallel x {data_parallel_size or world // max(1, size)} data-parallel ranks "
                f"are not the {world} processes"
            )
        rows = [list(range(first, first + size)) for first in range(0, world, size)]
        columns = [list(range(first, world, size)) for first in range(size)]
        early[_core.Axis.Tp] = dist.new_subgroups_by_enumeration(rows)[0]
        early[_core.Axis.DpShard] = dist.new_subgroups_by_enumeration(columns)[0]
    return early[_core.Axis.DpShard], early[_core.Axis.Tp]


def _alone() -> Any:
    """A group of this process only."""
    if _own_group[0] is not dist.group.WORLD:
        _own_group[:] = [dist.group.WORLD, dist.new_group([dist.get_rank()], use_local_synchronization=True)]
    return _own_group[1]


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
    mesh, early = _mesh(), _early_tensor_group()
    return mesh.size(_core.Axis.Tp) if mesh is not None else 1 if early is None else dist.get_world_size(early)


def _get_model_parallel_rank() -> int:
    mesh, early = _mesh(), _early_tensor_group()
    return mesh.rank(_core.Axis.Tp) if mesh is not None else 0 if early is None else dist.get_rank(early)


def _early_tensor_group() -> Any:
    return _made_early().get(_core.Axis.Tp) if dist.is_initialized() else None


def get_tensor_model_parallel_src_rank() -> int:
    """The number, among all processes, of the first rank that holds a slice of this one's model."""
    if _get_model_parallel_world_size() == 1:
        return dist.get_rank()
    return dist.get_process_group_ranks(_get_tensor_model_parallel_group())[0]


_get_model_parallel_group = _get_tensor_model_parallel_group
get_tensor_model_parallel_group = _get_tensor_model_parallel_group
get_tensor_model_parallel_world_size = _get_model_parallel_world_size
get_tensor_model_parallel_rank = _get_model_parallel_rank
get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_group = _get_model_parallel_group
get_model_parallel_world_size = _get_model_parallel_world_size
get_model_parallel_rank = _get_model_parallel_rank


def _get_sequence_data_parallel_group() -> Any:
    """Ranks that exchange gradients: data-parallel times sequence-parallel ones."""
    own = _from_mpu("get_sequence_data_parallel_group")
    if own is not None:
        return own()
    if _get_sequence_parallel_world_size() == 1:
        return _get_data_parallel_group()
    if _get_sequence_data_parallel_world_size() == dist.get_world_size():
        return dist.group.WORLD
    raise NotServed(
        "[deepspeed.utils.groups] there is no torch group of a model's data- and sequence-parallel ranks beside tensor "
        "parallelism; engine.seq_dp_world_size says how many they are"
    )


def _get_sequence_data_parallel_world_size() -> int:
    return _get_data_parallel_world_size() * _get_sequence_parallel_world_size()


def _get_sequence_data_parallel_rank() -> int:
    return _get_data_parallel_rank() * _get_sequence_parallel_world_size() + _get_sequence_parallel_rank()
