"""The default process group of torch.distributed, and the environment that names its ranks."""

from __future__ import annotations

import datetime
import json
import socket
import warnings
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from tessera import _core
from tessera._former import of_init_distributed, takes_former
from tessera.errors import ConfigError

__all__ = ["free_port", "init_distributed", "local_rank", "register_backend"]

if not dist.is_initialized():
    # Functions of this module keep the default group of the moment of its import as a default argument, and torch
    # imports it late, with the first optimizer. Then destroy_process_group() ends no group, and the group's threads,
    # which let go of tensors that Python knows, may run into Python's end: that aborts the process.
    import torch.distributed.nn.functional

DEFAULT_TIMEOUT = datetime.timedelta(minutes=10)


def register_backend() -> None:
    """Makes the back end "tessera" known to torch.distributed in this process; a second call does nothing.

    After it, `torch.distributed.init_process_group("tessera")` (or "cpu:tessera,cuda:nccl") gives process groups whose
    CPU collectives go through shared memory where their ranks share a host, and through Gloo where not.
    init_distributed("tessera") calls it itself.
    """
    if "tessera" not in dist.Backend.backend_list:
        dist.Backend.register_backend("tessera", _core.tessera_backend, devices=["cpu"])


@takes_former(of_init_distributed)
def init_distributed(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: datetime.timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    *,
    other_launchers: bool = True,
    port: int = 0,
) -> None:
    """Creates the default process group of torch.distributed; does nothing when there is one.

    Ranks come from the arguments or from the environment: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as
    `tessera launch`, tessera-run and torchrun set them; with `other_launchers` also what mpirun, mpiexec and srun set.
    Without any the process is a world of its own and opens no port. `port`, where it is given, wins over the port of a
    job, and MASTER_PORT over it. `backend` None: nccl where CUDA runs, else gloo; "tessera" is the back end of
    register_backend().

    Where the back end is an accelerator's own, as NCCL, this rank's device (own_device()) is the current one from here
    on, and the group is bound to it. ConfigError on all ranks where one of them has no device, or another's.
    """
    if not dist.is_available():
        raise RuntimeError("[init_distributed] this torch has no torch.distributed")
    if dist.is_initialized():
        return
    place: tuple[str, int] | None = None
    if init_method is not None and init_method.startswith("tcp://"):
        rank, world_size, place = _given_by(init_method, rank, world_size)
    launch = launched(rank, world_size, other_launchers, port, rendezvous=init_method in (None, "env://"))
    rank, world_size = launch.rank, launch.size
    named = backend is not None
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if "tessera" in backend:
        register_backend()
    timeout = timeout or DEFAULT_TIMEOUT
    alone = init_method is None and not launch.address
    if alone:
        store: Any = torch._C._distributed_c10d.HashStore()
    elif init_method is None or init_method == "env://":
        store = _job_store(rank, world_size, launch.address or "127.0.0.1", launch.port, timeout)
    elif place is not None:
        store = _job_store(rank, world_size, *place, timeout, init_method)
    else:
        store, rank, world_size = next(rendezvous(init_method, rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
    store = torch._C._distributed_c10d.PrefixStore("default_pg", store)

    back_ends = str(dist.distributed_c10d.BackendConfig(dist.Backend(backend)))
    device = own_device(back_ends)
    announced = _Announced(back_ends, device, "" if device else _why_none(back_ends, chosen=named))
    announced.check("init_distributed", lambda text: _core.exchange_all(store, rank, world_size, "devices", text))
    bound = device if "nccl" in backend else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=bound)
    if not alone:
        assert dist.group.WORLD is not None
        _core.show_process(dist.group.WORLD.group_name)


def launched(
    rank: int = -1,
    world_size: int = -1,
    other_launchers: bool = True,
    port: int = 0,
    rendezvous: bool = True,
) -> _core.Launch:
    """How this process was started; arguments win over variables. `rendezvous` False: ranks meet elsewhere and need no
    address."""
    try:
        return _core.read_launch(rank, world_size, other_launchers, rendezvous, port)
    except ConfigError as error:
        raise ConfigError(f"[init_distributed] {str(error).partition('] ')[2]}") from None


def _given_by(init_method: str, rank: int, world_size: int) -> tuple[int, int, tuple[str, int]]:
    """Rank, number of ranks, address and port of tcp://ADDRESS:PORT?rank=..&world_size=.."""
    try:
        url = urlsplit(init_method)
        port, query = url.port, {key: int(values[0]) for key, values in parse_qs(url.query).items()}
    except ValueError as error:
        raise ConfigError(f"[init_distributed] init_method {init_method!r}: {error}") from None
    if not url.hostname or not port:
        raise ConfigError(f"[init_distributed] init_method {init_method!r} must be tcp://ADDRESS:PORT")
    return query.get("rank", rank), query.get("world_size", world_size), (url.hostname, port)


def _job_store(
    rank: int, world_size: int, address: str, port: int, timeout: datetime.timedelta, method: str = ""
) -> Any:
    """The store there, with all ranks there."""
    try:
        return _core.open_job_store(address, port, rank, world_size, timeout)
    except RuntimeError as error:
        reason = str(error).split("\n", 1)[0].removeprefix("[comm] ")
        where = method or f"MASTER_ADDR {address}, MASTER_PORT {port}"
        raise dist.DistBackendError(
            f"[init_distributed] rank {rank} of {world_size} could not meet the others at {where}: {reason}"
        ) from None


def free_port() -> int:
    """A TCP port of this host where a store of this process or another may listen. The port stays this process's until
    that ends: its socket stays open, on every address, so that the system gives the port to nothing else; stores reuse
    addresses. Local."""
    return _core.free_port()


def local_rank() -> int:
    """LOCAL_RANK, or what another launcher has for it; 0 where none set it."""
    return _core.launched_local_rank()


# ---- the devices of ranks


def own_device(back_ends: str) -> torch.device | None:
    """The accelerator that one of `back_ends` ("cpu:gloo,cuda:nccl") is for alone, as NCCL for CUDA; None where there
    is none (Gloo is the CPU's, whatever else it serves).

    Of several devices the program's current one is taken, else (where that is still the first) that of
    local_rank(), which then is the current one. Where there are several, but not that one, a warning says so.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type not in _of_accelerators(back_ends):
        return None
    index, local, count = torch.accelerator.current_device_index(), local_rank(), torch.accelerator.device_count()
    if index == 0 and local < count:
        torch.accelerator.set_device_index(index := local)
    elif index == 0 and count > 1:
        warnings.warn(
            f"[init_distributed] LOCAL_RANK is {local}, but this process sees {count} devices: it takes {kind.type}:0",
            stacklevel=3,
        )
    return torch.device(kind.type, index)


def check_own_device(group: dist.ProcessGroup, device: torch.device, no_kernels: str = "") -> None:
    """ConfigError on all ranks of `group`, whose back end is an accelerator's own, where one has the device of another;
    NotImplementedError where one says why it has `no_kernels` for its. Collective."""
    announced = _Announced(dist.get_backend_config(group), device, "", no_kernels)
    announced.check("initialize", lambda text: _core.exchange_ranks(group.group_name, "devices", text))


def _of_accelerators(back_ends: str) -> dict[str, str]:
    """Device types with a back end that is not the CPU's too."""
    by_type = dict(entry.split(":", 1) for entry in back_ends.split(","))
    return {kind: name for kind, name in by_type.items() if kind != "cpu" and name != by_type.get("cpu")}


def _why_none(back_ends: str, chosen: bool) -> str:
    """What is missing where own_device() finds no device; "" where none is needed. `chosen`: the caller named the back
    end; else others may have found a better one, and the reason is theirs to know."""
    kinds = _of_accelerators(back_ends)
    if chosen and not kinds:
        return ""
    kind = next(iter(kinds), "cuda")
    try:
        if kind == "cuda":
            torch.cuda.init()
        return f"torch sees no device of type {kind!r}"
    except (AssertionError, RuntimeError) as error:
        return f"torch sees no device of type {kind!r}: {str(error).splitlines()[0]}"


class _Announced:
    """What each rank announces to the others before they talk through a back end."""

    def __init__(self, back_ends: str, device: torch.device | None, why_none: str, no_kernels: str = "") -> None:
        self.needed = device is not None or bool(_of_accelerators(back_ends))
        self.announced = {"back_ends": back_ends, "host": socket.gethostname(), "why_none": why_none, "uuid": ""}
        self.announced["no_kernels"] = no_kernels.split("\n", 1)[0]
        if device is not None:
            module = torch.get_device_module(device.type)
            known = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
            name = getattr(known, "name", "")
            self.announced |= {
                "device": f"{device} ({name})" if name else str(device),
                "uuid": str(getattr(known, "uuid", "")),
            }

    def check(self, origin: str, exchange: Callable[[str], list[str]]) -> None:
        """ConfigError on all ranks where the ranks cannot talk so. Collective, by way of `exchange`."""
        ranks = [json.loads(text) for text in exchange(json.dumps(self.announced))]
        for rank, announced in enumerate(ranks):
            if announced["back_ends"] != ranks[0]["back_ends"] or ("device" not in announced and self.needed):
                raise ConfigError(f"[{origin}] {_unlike(rank, ranks)}")
            if announced["no_kernels"]:
                raise NotImplementedError(
                    f"[{origin}] rank {rank} (host {announced['host']!r}): {announced['no_kernels']}"
                )
        holders: dict[str, int] = {}
        for rank, announced in enumerate(ranks):
            first = holders.setdefault(announced["uuid"], rank) if announced["uuid"] else rank
            if first != rank:
                raise ConfigError(f"[{origin}] {_shared(first, rank, announced)}")


def _unlike(rank: int, ranks: list[dict[str, str]]) -> str:
    lines = [
        f"rank {r} (host {ranks[r]['host']!r}) has the back end {ranks[r]['back_ends']!r}"
        + (f"; {ranks[r]['why_none']}" if ranks[r]["why_none"] else "")
        for r in sorted({0, rank})
    ]
    return (
        ", ".join(lines) + ". All ranks need a device, or none may: mend that rank's, or let all talk over Gloo: "
        'tessera.init_distributed("gloo")'
    )


def _shared(first: int, rank: int, of: dict[str, str]) -> str:
    return (
        f"ranks {first} and {rank} of host {of['host']!r} have one device, {of['device']}, and the back end "
        f"{of['back_ends']!r} needs one for each rank. Start no more ranks on a host than it has devices (tessera "
        "launch --num_gpus, torchrun --nproc-per-node; a rank's device is that of LOCAL_RANK unless the program chose "
        'another), or let them talk over Gloo: tessera.init_distributed("gloo")'
    )


def prepare() -> None:
    """Makes the default process group as initialize() does: none for a lone process nobody asked a group for."""
    if not (dist.is_available() and dist.is_initialized()) and launched(rendezvous=False).size > 1:
        init_distributed()
