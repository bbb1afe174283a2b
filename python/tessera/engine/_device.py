"""Where an engine's model is."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

from tessera import _core
from tessera._copies import cast_buffers, named_for_fp32
from tessera._device import same_objects
from tessera.errors import ConfigError
from tessera.zero.engines import holder_of


def move_to_device(model: nn.Module, device: torch.device | None) -> torch.device:
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


def settle_buffers(model: nn.Module, settings: _core.Config) -> None:
    """Their dtypes, as data_types of the configuration says."""
    in_fp16, in_bf16 = settings.fp16.enabled, settings.bf16.enabled
    kept = settings.data_types.keep_in_fp32_modules
    if kept is None:
        kept = named_for_fp32(model, in_fp16)
    try:
        cast_buffers(model, settings.data_types.buffer_dtype, kept if in_fp16 or in_bf16 else ())
    except re.error as error:
        raise ConfigError(f"[config] data_types.keep_in_fp32_modules: {error} in {kept}") from None


def keep_device(model: nn.Module) -> Callable[[], None]:
    """Returns a call that moves `model` back to the device where it is now, if some of it has left that."""

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
