"""The default process group of torch.distributed, and the environment that tells its ranks."""

from __future__ import annotations

import datetime
import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from tessera import _core
from tessera.errors import ConfigError

__all__ = ["free_port", "init_distributed", "local_rank", "register_backend"]

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
