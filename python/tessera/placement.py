"""Where an engine's model is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tessera import distributed
from tessera.partition import holder_of


def place(model: nn.Module, device: torch.device | None) -> torch.device:
    """The device of `model`'s parameters, the CPU where it has none.

    A plain model on the CPU is moved to `device` before. None is moved that is elsewhere already, whose parameters an
    engine or zero.Init holds, or where `device` is None.
    """
    parameters = list(model.parameters())
    plain = all(p.device.type == "cpu" and holder_of(p) is None for p in parameters)
    if parameters and plain and device is not None:
        with _same_objects(parameters[0], device):
            model.to(device)
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def keep_place(model: nn.Module) -> Callable[[], None]:
    """What moves `model` back to the device where it is now, if it has left it."""
    first = next(model.parameters(), None)
    origin = None if first is None else first.device

    def move_back() -> None:
        if first is not None and origin is not None and first.device != origin:
            with _same_objects(first, origin):
                model.to(origin)

    return move_back


def move(param: nn.Parameter, device: torch.device) -> None:
    """Moves one parameter, which stays the object that it is."""
    there = nn.Parameter(param.detach().to(device), requires_grad=param.requires_grad)
    if torch._has_compatible_shallow_copy_type(param, there):
        param.data = there.data
    else:
        torch.utils.swap_tensors(param, there)


@contextmanager
def _same_objects(param: nn.Parameter, device: torch.device) -> Iterator[None]:
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
