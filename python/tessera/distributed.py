"""Process groups: the environment, torch.distributed, and what the core gets of them."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tessera import _core
from tessera.errors import ConfigError

if not dist.is_initialized():
    # Its functions keep the default group of the moment of their import as a default argument, and torch imports them
    # late, with the first optimizer. Then destroy_process_group() ends no group, and the group's threads, which let go
    # of tensors that Python knows, may run into Python's end: that aborts the process.
    import torch.distributed.nn.functional

_DEFAULT_TIMEOUT = datetime.timedelta(minutes=10)


def register_backend() -> None:
    """Makes the back end "tessera" known to torch.distributed in this process; a second call does nothing.

    After it, `torch.distributed.init_process_group("tessera")` (or "cpu:tessera,cuda:nccl") gives process groups whose
    CPU collectives go through shared memory where their ranks share a host, and through Gloo where not.
    init_distributed(dist_backend="tessera") calls it itself.
    """
    if "tessera" not in dist.Backend.backend_list:
        dist.Backend.register_backend("tessera", _core.tessera_backend, devices=["cpu"])


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Creates the default process group of torch.distributed; does nothing when there is one.

    Ranks come from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them, or from the arguments. Without
    either the process is a world of its own and opens no port. `dist_backend` None: nccl where CUDA runs, else gloo;
    "tessera" is that of register_backend(). `verbose` and `config` are not read: they are there for callers that pass
    them.
    """
    if not dist.is_available():
        raise RuntimeError("[init_distributed] this torch has no torch.distributed")
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise RuntimeError(
            "[init_distributed] dist_init_required is False, but there is no process group yet; call "
            "torch.distributed.init_process_group first"
        )
    rank, world_size = _place(rank, world_size, _environment(auto_mpi_discovery))
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if "tessera" in backend:
        register_backend()
    timeout = timeout or _DEFAULT_TIMEOUT
    if init_method is None and world_size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(
            backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1, timeout=timeout
        )
        return
    if init_method is None:
        store = torch._C._distributed_c10d.PrefixStore(
            "default_pg", _job_store(rank, world_size, distributed_port, timeout)
        )
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
    assert dist.group.WORLD is not None
    _core.show_process(dist.group.WORLD.group_name)


def _place(rank: int, world_size: int, environment: dict[str, int]) -> tuple[int, int]:
    """This rank and the number of ranks, from the arguments or else the environment."""
    ranks = "world_size" if world_size > 0 else "WORLD_SIZE"
    if world_size <= 0:
        world_size = environment.get("WORLD_SIZE", 0 if environment.get("RANK", 0) > 0 else 1)
        if world_size < 1:
            said = f"is {os.environ['WORLD_SIZE']}" if os.environ.get("WORLD_SIZE") else "is not set"
            raise ConfigError(f"[init_distributed] WORLD_SIZE {said}; it must be the number of ranks, 1 at least")
    name = "rank" if rank >= 0 else "RANK"
    if rank < 0:
        if world_size > 1 and "RANK" not in environment:
            raise ConfigError(f"[init_distributed] {ranks} is {world_size}, but RANK is not set")
        rank = environment.get("RANK", 0)
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"[init_distributed] {name} is {rank}, but {ranks} is {world_size}: ranks are 0 to {world_size - 1}"
        )
    return rank, world_size


def _job_store(rank: int, world_size: int, distributed_port: int, timeout: datetime.timedelta) -> Any:
    """The store at MASTER_ADDR:MASTER_PORT, with all ranks there."""
    address = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if world_size == 1 else None)
    if address is None:
        raise ConfigError(
            f"[init_distributed] there are {world_size} ranks, but MASTER_ADDR, where rank 0 is, is not set"
        )
    text = os.environ.get("MASTER_PORT") or str(distributed_port)
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ConfigError(f"[init_distributed] MASTER_PORT is {text!r}; it must be a port, 1 to 65535")
    try:
        return _core.open_job_store(address, int(text), rank, world_size, timeout)
    except RuntimeError as error:
        reason = str(error).split("\n", 1)[0].removeprefix("[comm] ")
        raise dist.DistBackendError(
            f"[init_distributed] rank {rank} of {world_size} could not meet the others at MASTER_ADDR {address}, "
            f"MASTER_PORT {text}: {reason}"
        ) from None


def _environment(auto_mpi_discovery: bool) -> dict[str, int]:
    names = {"RANK": ["RANK"], "WORLD_SIZE": ["WORLD_SIZE"], "LOCAL_RANK": ["LOCAL_RANK"]}
    if auto_mpi_discovery:
        names["RANK"].append("OMPI_COMM_WORLD_RANK")
        names["WORLD_SIZE"].append("OMPI_COMM_WORLD_SIZE")
        names["LOCAL_RANK"].append("OMPI_COMM_WORLD_LOCAL_RANK")
    found: dict[str, int] = {}
    for name, spellings in names.items():
        for spelling in spellings:
            text = os.environ.get(spelling)
            if text:
                try:
                    found.setdefault(name, int(text))
                except ValueError:
                    raise ConfigError(f"[init_distributed] {spelling} must be an integer, got {text!r}") from None
    return found


def free_port() -> int:
    """A TCP port of this host where a store of this process or another may listen. It stays this process's until that
    ends: its socket stays open, on every address, so that the system gives the port to nothing else; stores reuse
    addresses. Local."""
    dual = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET) as held:
        if dual:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        os.dup(held.fileno())
        return int(held.getsockname()[1])


def local_rank() -> int:
    """LOCAL_RANK, or 0 where no launcher set it."""
    return _environment(True).get("LOCAL_RANK", 0)


def prepare(dist_init_required: bool | None, distributed_port: int) -> None:
    """What initialize() does about the default process group: nothing for a lone process nobody asked a group for."""
    if dist.is_available() and dist.is_initialized():
        return
    several = _place(-1, -1, _environment(True))[1] > 1
    if dist_init_required is False or dist_init_required or several:
        init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)


def core_group(group: Any = None) -> _core.Group:
    """The core's view of `group`: a group of the core, a torch ProcessGroup, or None for all processes."""
    if isinstance(group, _core.Group):
        return group
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return _core.single_group()
        group = dist.group.WORLD
    if dist.get_world_size(group) == 1:
        return _core.single_group()
    return _core.c10d_group(group.group_name)


def world_of(mesh: _core.Mesh) -> tuple[int, int]:
    """(rank, size) among all processes of the job; among the ranks of `mesh` where torch knows no others."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return dist.get_rank(), dist.get_world_size()
    axes = [_core.Axis.DpReplicate, _core.Axis.DpShard, _core.Axis.Sp, _core.Axis.Tp]
    return mesh.rank(axes), mesh.size(axes)


class OwnGroups(list[Any]):
    """Process groups, and which process made them. `along`: those of torch along the axes of a mesh, by the axes' name,
    also where somebody else made them."""

    def __init__(self, groups: Iterable[Any] = (), along: dict[str, Any] | None = None) -> None:
        super().__init__(groups)
        self.along = along or {}
        self.process = os.getpid()


def mesh_sizes(config: _core.Config) -> dict[str, int]:
    """What a configuration says of the sizes that core_mesh() takes."""
    return {
        "shards": config.get("zero_optimization.mics_shard_size"),
        "sp": config.get("sequence_parallel_size"),
        "tp": max(1, config.get("tensor_parallel.autotp_size")),
    }


def core_mesh(group: Any = None, shards: int = -1, sp: int = 1, tp: int = 1) -> tuple[_core.Mesh, OwnGroups]:
    """The ranks of an engine on the core's axes, and the process groups that were created for it.

    `group`: all these ranks, as in core_group(); or a DeviceMesh with dimensions named dp_replicate, dp_shard, sp, tp,
    or without such names of one dimension (dp_shard) or two (dp_replicate, dp_shard); or a mesh of the core. `tp`
    consecutive ranks hold slices of one model, `sp` neighbours of those one sequence, of the rest `shards` (> 0) share
    model states and the others replicate them; where that needs new process groups, the call is collective over all
    processes of torch.distributed."""
    if isinstance(group, (_core.Mesh, DeviceMesh)):
        mesh = _from_device_mesh(group) if isinstance(group, DeviceMesh) else group
        _check_axis(mesh, _core.Axis.Sp, sp, "sequence_parallel_size")
        _check_axis(mesh, _core.Axis.Tp, tp, "tensor_parallel.autotp_size")
        return mesh, OwnGroups(along=_groups_of(group) if isinstance(group, DeviceMesh) else {})
    whole = core_group(group)
    shape = _core.mesh_shape(whole.size, shards, sp, tp)
    if shape.size(_core.Axis.DpShard) == whole.size:
        world = dist.group.WORLD if group is None else group
        known = {} if world is None or isinstance(group, _core.Group) else {"dp_shard": world}
        return _core.Mesh(whole), OwnGroups(along=known)
    if isinstance(group, _core.Group):
        raise ConfigError(
            "[config] zero_optimization.mics_shard_size, sequence_parallel_size and tensor_parallel.autotp_size need "
            "torch process groups; with groups of tessera pass a Mesh with these axes"
        )
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    mesh, made = _core.Mesh(), OwnGroups()
    for axes in shape.groups():
        rows = {tuple(ranks[other] for other in shape.ranks_along(axes, number)) for number in range(len(ranks))}
        made.append(dist.new_subgroups_by_enumeration([list(row) for row in sorted(rows)])[0])
        made.along[axes.name] = made[-1]
        mesh.set(axes, core_group(made[-1]))
    return mesh, made


def _check_axis(mesh: _core.Mesh, axis: _core.Axis, ranks: int, key: str) -> None:
    if ranks > 1 and mesh.size(axis) != ranks:
        raise ConfigError(
            f"[config] {key} is {ranks}, but the mesh has {mesh.size(axis)} ranks along '{_core.Axes(axis).name}'"
        )


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
    # By their places: the data-parallel ones.
    return names if set(names) & set(_AXES) else ("dp_replicate", "dp_shard")[-mesh.ndim :]


def _groups_of(mesh: DeviceMesh) -> dict[str, Any]:
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
