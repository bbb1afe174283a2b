"""Where an engine's model is."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

from tessera._device import same_objects
from tessera.zero._owners import holder_of


def place(model: nn.Module, device: torch.device | None) -> torch.device:
    """The device of `model`'s parameters, the CPU where it has none.

    A plain model on the CPU is moved to `device` before. None is moved that is elsewhere already, whose parameters an
    engine or zero.Init holds, or where `device` is None.
    """
    parameters = list(model.parameters())
    plain = all(p.device.type == "cpu" and holder_of(p) is None for p in parameters)
    if parameters and plain and device is not None:
        with same_objects(parameters[0], device):
            model.to(device)
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def keep_place(model: nn.Module) -> Callable[[], None]:
    """What moves `model` back to the device where it is now, if some of it has left it."""

    def devices() -> set[torch.device]:
        return {t.device for t in (*model.parameters(), *model.buffers())}

    before = devices()

    def move_back() -> None:
        if len(before) != 1 or devices() == before:
            return
        traceback.clear_frames(sys.exc_info()[2])  # where torch swaps tensors nobody else may hold them
        (origin,) = before
        moved = [p for p in model.parameters() if p.device != origin]
        with same_objects(moved[0], origin) if moved else nullcontext():
            model.to(origin)

    return move_back
