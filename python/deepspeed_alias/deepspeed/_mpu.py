"""Turns what callers pass as `mpu` or `mesh_param` into the ranks that tessera.initialize takes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from tessera.engine.front import RankOrder, core_group, values_of_all
from tessera.errors import ConfigError
from tessera.sequence import SequenceParallelGroups

import tessera
from tessera import Axis, Mesh

# Getters that an mpu may offer -> the axes of the group.
_MPU_GROUPS = (
    ("get_data_parallel_group", [Axis.DpShard]),
    ("get_sequence_parallel_group", [Axis.Sp]),
    ("get_tensor_model_parallel_group", [Axis.Tp]),
    ("get_sequence_data_parallel_group", [Axis.DpShard, Axis.Sp]),
)


def ranks_of(mpu: Any, config: tessera.Config, mesh_param: tuple[int, int] | None) -> Any:
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
    mesh = Mesh()
    for getter, axes in _MPU_GROUPS:
        if not hasattr(mpu, getter) or (len(axes) > 1 and (sequence == 1 or mesh.batch_size() == 1)):
            continue
        mesh.set(axes, core_group(getattr(mpu, getter)()))
    _check_mesh_param(config, mesh_param, mesh.size(list(Axis.__members__.values())))
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


def _check_mesh_param(config: tessera.Config, mesh_param: tuple[int, int] | None, ranks: Any = None) -> None:
    """`ranks`: a group, or how many there are; None: all."""
    if mesh_param is None:
        return
    world = ranks if isinstance(ranks, int) else core_group(ranks).size
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


def order_of(slices: Any) -> RankOrder | None:
    """The order in which the ranks of torch groups that each hold the slices of one model follow one another (`slices`:
    this rank's group); None where it is the processes' own. ConfigError where the groups are no layout of all.
    Collective."""
    world = dist.get_world_size()
    rows: list[list[int]] = values_of_all(dist.get_process_group_ranks(slices))
    parts = sorted({tuple(sorted(row)) for row in rows})
    order = [rank for part in parts for rank in part]
    columns = [sorted(part[place] for part in parts) for place in range(len(parts[0]))]
    if sorted(order) != list(range(world)) or len({len(part) for part in parts}) > 1:
        raise ConfigError(f"[initialize] tp_group: the groups {parts} are no equal parts of {world} processes")
    if columns != [[part[place] for part in parts] for place in range(len(parts[0]))]:
        raise ConfigError(f"[initialize] tp_group: ranks of the groups {parts} have their places in another order")
    return None if order == list(range(world)) else RankOrder(order)


class Mpu:
    """Groups of sequence-parallel training by the getters that callers of an mpu know."""

    def __init__(self, groups: SequenceParallelGroups) -> None:
        self.groups = groups

    def __deepcopy__(self, memo: dict[int, Any]) -> Mpu:
        return self


_OF_MPU = {
    "sequence_parallel": "sequence",
    "data_parallel": "data",
    "sequence_data_parallel": "both",
    "tensor_model_parallel": "tensor",
}
for _name, _group in _OF_MPU.items():
    setattr(Mpu, f"get_{_name}_group", lambda mpu, of=_group: getattr(mpu.groups, of))
    setattr(Mpu, f"get_{_name}_rank", lambda mpu, of=_group: mpu.groups.rank(of))
    setattr(Mpu, f"get_{_name}_world_size", lambda mpu, of=_group: mpu.groups.size(of))
