"""The device of a process group, and moving parameters there."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tessera import _core, distributed
from tessera._mesh import RankOrder


def move(param: nn.Parameter, device: torch.device) -> None:
    """Moves one parameter, which stays the object that it is."""
    there = nn.Parameter(param.detach().to(device), requires_grad=param.requires_grad)
    if torch._has_compatible_shallow_copy_type(param, there):
        param.data = there.data
    else:
        torch.utils.swap_tensors(param, there)


@contextmanager
def same_objects(param: nn.Parameter, device: torch.device) -> Iterator[None]:
    """Makes Module.to(device) inside the `with` keep parameters the objects that they are, as a client's optimizer
    holds them.

    Module.to() does so anyway, but for devices whose tensors cannot be the data of a tensor of the CPU's.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    exchange = not torch._has_compatible_shallow_copy_type(param, torch.empty(0, device=device))
    torch.__future__.set_swap_module_params_on_conversion(exchange or before)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def group_device(group: Any) -> torch.device | None:
    """The accelerator for which `group` (as in core_mesh()) has a back end of its own, as NCCL for CUDA: this rank's,
    as distributed.own_device() has it. None where the group has none, and without a process group of torch."""
    parts = _torch_groups(group)
    return distributed.own_device(dist.get_backend_config(parts[-1])) if parts else None


def group_timeout() -> datetime.timedelta | None:
    """The default group's timeout, where its back end says one: torch gives new groups a default. None without a
    group."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None:
        return None
    return _core.group_timeout(world.group_name, group_device(None) or torch.device("cpu"))


def checked_device(group: Any, parameters: Iterable[nn.Parameter] = ()) -> torch.device | None:
    """group_device(). NotImplementedError on all ranks where one has no kernels for it, or for the device where its
    `parameters` are; ConfigError on all where the process group needs a device a rank and two have one. Collective."""
    device = group_device(group)
    there = next((p.device for p in parameters if p.device.type not in ("cpu", "meta")), device)
    if there is None:
        return None
    failure = None
    try:
        _core.check_device(there)
    except NotImplementedError as error:
        failure = error
    for part in _torch_groups(group):
        if part.size() > 1 and distributed.own_device(dist.get_backend_config(part)):
            distributed.check_own_device(part, there, str(failure or ""))
    if failure is not None:
        raise failure
    return device


def _torch_groups(group: Any) -> list[dist.ProcessGroup]:
    """The process groups of torch in `group`, as in core_mesh()."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    if isinstance(group, DeviceMesh):
        return group.get_all_groups()
    group = dist.group.WORLD if group is None or isinstance(group, RankOrder) else group
    return [group] if isinstance(group, dist.ProcessGroup) else []


def emulated(config: _core.Config, device: torch.device) -> list[str]:
    """The warning of an engine in bf16 on a card without bf16 arithmetic: torch computes in fp32 there and rounds."""
    autocasts = config.torch_autocast.enabled and config.torch_autocast.dtype != torch.float16
    if not (autocasts or config.bf16.enabled) or device.type != "cuda" or torch.version.hip is not None:
        return []
    major, minor = torch.cuda.get_device_capability(device)
    if major >= 8:
        return []
    return [
        f"[initialize] bf16 is on, and {device} ({torch.cuda.get_device_name(device)}) has compute capability "
        f"{major}.{minor}: bf16 arithmetic begins with 8.0, before it is emulated and slow; fp16 is fast there"
    ]
