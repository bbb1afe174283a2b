"""The device of a process group, and moving parameters there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tessera import distributed


def move(param: nn.Parameter, device: torch.device) -> None:
    """Moves one parameter, which stays the object that it is."""
    there = nn.Parameter(param.detach().to(device), requires_grad=param.requires_grad)
    if torch._has_compatible_shallow_copy_type(param, there):
        param.data = there.data
    else:
        torch.utils.swap_tensors(param, there)


@contextmanager
def same_objects(param: nn.Parameter, device: torch.device) -> Iterator[None]:
    """Inside, Module.to(device) keeps parameters the objects that they are, as a client's optimizer holds them.

    It does anyway, but for devices whose tensors cannot be the data of one of the CPU's.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    exchange = not torch._has_compatible_shallow_copy_type(param, torch.empty(0, device=device))
    torch.__future__.set_swap_module_params_on_conversion(exchange or before)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def group_device(group: Any) -> torch.device | None:
    """The accelerator that `group` (as in core_mesh()) has a back end of its own for, as NCCL for CUDA.

    None where it has none (Gloo is the CPU's, whatever else it serves), and without a process group of torch. Of
    several devices it is the one that the program made the current one, else (that is still the first) that of
    LOCAL_RANK, which then is the current one.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or not (dist.is_available() and dist.is_initialized()):
        return None
    if isinstance(group, DeviceMesh):
        group = group.get_group(group.ndim - 1)
    if not (group is None or isinstance(group, dist.ProcessGroup)):
        return None
    back_ends = dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(","))
    own = back_ends.get(kind.type)
    if own is None or own == back_ends.get("cpu"):
        return None
    index, local = torch.accelerator.current_device_index(), distributed.local_rank()
    if index == 0 and local < torch.accelerator.device_count():
        torch.accelerator.set_device_index(index := local)
    return torch.device(kind.type, index)
