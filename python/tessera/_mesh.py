"""Process groups as the core gets them, and the ranks of an engine on the axes of a mesh."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Union

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tessera import _core
from tessera.errors import ConfigError, UsageError

OneGroup = Union["dist.ProcessGroup", _core.Group]
"""Ranks, as core_group() takes them."""
Ranks = OneGroup | DeviceMesh | _core.Mesh
"""Ranks, as core_mesh() takes them."""


def core_group(group: OneGroup | None = None) -> _core.Group:
    """The core's view of `group`: a group of the core, a torch ProcessGroup, or None for all processes."""
    if isinstance(group, _core.Group):
        return group
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            _check_alone()
            return _core.single_group()
        group = dist.group.WORLD
    if dist.get_world_size(group) == 1 or group is None:
        return _core.single_group()
    return _core.c10d_group(group.group_name)


def _check_alone() -> None:
    """UsageError where a launcher has started several ranks, which would all be worlds of their own."""
    own = _core.read_launch(-1, -1, True, False, 0)
    if own.size > 1:
        raise UsageError(
            f"[initialize] this is rank {own.rank} of {own.size}, but there is no process group: call "
            "tessera.init_distributed() first, or pass the group"
        )


class RankOrder(tuple[int, ...]):
    """All processes of the job in another order than their numbers', for core_mesh() to lay out."""


def world_of(mesh: _core.Mesh) -> tuple[int, int]:
    """(rank, size) among all processes of the job; among the ranks of `mesh` where torch knows no others."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return dist.get_rank(), dist.get_world_size()
    axes = [_core.Axis.DpReplicate, _core.Axis.DpShard, _core.Axis.Sp, _core.Axis.Tp]
    return mesh.rank(axes), mesh.size(axes)


class OwnGroups(list["dist.ProcessGroup"]):
    """Process groups, and which process made them. `along`: those of torch along the axes of a mesh, by the axes' name,
    also where somebody else made them."""

    def __init__(
        self, groups: Iterable[dist.ProcessGroup] = (), along: dict[str, dist.ProcessGroup] | None = None
    ) -> None:
        super().__init__(groups)
        self.along = along or {}
        self.process = os.getpid()


def mesh_sizes(config: _core.Config) -> dict[str, int]:
    """The sizes for core_mesh() that a configuration says."""
    return {
        "shards": config.zero_optimization.mics_shard_size,
        "sp": config.sequence_parallel_size,
        "tp": max(1, config.tensor_parallel.autotp_size),
    }


def core_mesh(
    group: Ranks | RankOrder | None = None,
    shards: int = -1,
    sp: int = 1,
    tp: int = 1,
    device: torch.device | None = None,
) -> tuple[_core.Mesh, OwnGroups]:
    """The ranks of an engine on the core's axes, and the process groups that were created for it.

    `group`: all these ranks, as in core_group(), or all processes as a RankOrder; or a DeviceMesh with dimensions named
    dp_replicate, dp_shard, sp, tp, or without such names of one dimension (dp_shard) or two (dp_replicate, dp_shard);
    or a mesh of the core. `tp` consecutive ranks hold slices of one model, `sp` neighbours of those one sequence, of
    the rest `shards` (> 0) share model states and the others replicate them. Collective, but for a mesh: the ranks of
    `group`, which talk on `device` (None: the CPU), compare what they ask for, and where that needs new process groups
    all processes of torch.distributed make them."""
    if isinstance(group, (_core.Mesh, DeviceMesh)):
        mesh = _from_device_mesh(group) if isinstance(group, DeviceMesh) else group
        _core.check_sizes(mesh, sp, tp)
        return mesh, OwnGroups(along=_groups_of(group) if isinstance(group, DeviceMesh) else {})
    order, group = (group, None) if isinstance(group, RankOrder) else (None, group)
    whole = core_group(group)
    _core.check_asked(whole, torch.device("cpu") if device is None else device, shards, sp, tp)
    shape = _core.mesh_shape(whole.size, shards, sp, tp)
    if shape.size(_core.Axis.DpShard) == whole.size:
        world = dist.group.WORLD if group is None else group
        known = {} if world is None or isinstance(world, _core.Group) else {"dp_shard": world}
        return _core.Mesh(whole), OwnGroups(along=known)
    if isinstance(group, _core.Group):
        raise ConfigError(
            "[config] zero_optimization.mics_shard_size, sequence_parallel_size and tensor_parallel.autotp_size need "
            "torch process groups; with groups of tessera pass a Mesh with these axes"
        )
    ranks = order or dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    mesh, made = _core.Mesh(), OwnGroups()
    for axes in shape.groups():
        rows = {tuple(ranks[other] for other in shape.ranks_along(axes, number)) for number in range(len(ranks))}
        made.append(dist.new_subgroups_by_enumeration([list(row) for row in sorted(rows)])[0])
        made.along[axes.name] = made[-1]
        mesh.set(axes, core_group(made[-1]))
    return mesh, made


def discard(groups: OwnGroups) -> None:
    """Destroys process groups that core_mesh() created; the list is empty afterwards. A forked copy of the process only
    forgets them: their connections are the parent's."""
    groups.along = {}
    while groups:
        group = groups.pop()
        if dist.is_initialized() and groups.process == os.getpid():
            dist.destroy_process_group(group)


_AXES = {
    "dp_replicate": _core.Axis.DpReplicate,
    "dp_shard": _core.Axis.DpShard,
    "sp": _core.Axis.Sp,
    "tp": _core.Axis.Tp,
}


def _names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    names = mesh.mesh_dim_names or ()
    # The data-parallel axes, by their places.
    return names if set(names) & set(_AXES) else ("dp_replicate", "dp_shard")[-mesh.ndim :]


def _groups_of(mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    return {name: mesh.get_group(number) for number, name in enumerate(_names_of(mesh))}


def _from_device_mesh(mesh: DeviceMesh) -> _core.Mesh:
    names = _names_of(mesh)
    if len(names) != mesh.ndim or not set(names) <= set(_AXES) or list(names) != [n for n in _AXES if n in names]:
        raise ConfigError(
            f"[initialize] the DeviceMesh has the dimensions {mesh.mesh_dim_names or mesh.ndim}; name them, in this "
            f"order, {', '.join(_AXES)} (those that it has), or pass one (dp_shard) or two (dp_replicate, dp_shard) "
            "without such names"
        )
    result = _core.Mesh()
    for number, name in enumerate(names):
        result.set(_AXES[name], core_group(mesh.get_group(number)))
    if {"dp_shard", "sp"} <= set(names) and result.size(_core.Axis.DpShard) > 1 and result.size(_core.Axis.Sp) > 1:
        both = mesh["dp_shard", "sp"]._flatten("dp_shard_sp")
        result.set([_core.Axis.DpShard, _core.Axis.Sp], core_group(both.get_group()))
    return result
