"""Refuses modules that an engine cannot take, before it touches anything; the core refuses parameters."""

from __future__ import annotations

import sys

import torch
from torch import nn

from tessera.errors import ConfigError


def check_modules(model: nn.Module, partitions: bool, runs_on: bool) -> None:
    """ConfigError for modules without shapes; NotImplementedError for what parameters cannot be partitioned in,
    or waited for where updates run on."""
    _check_not_wrapped(model)
    lazy = [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer))
    ]
    if lazy:
        raise ConfigError(
            f"[initialize] {', '.join(lazy)}: lazy modules have no shapes yet; run one forward of the model with a "
            "sample (under torch.no_grad()) before"
        )
    scripts = [
        path or "(the model)"
        for path, module in model.named_modules()
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None
    ]
    if runs_on and scripts:
        raise NotImplementedError(
            f"[initialize] {', '.join(scripts)}: tessera.update_runs_on does not serve modules of torch.jit, "
            "which cannot wait for their parameters; use the modules that they were made of, or switch it off"
        )
    if partitions and scripts:
        raise NotImplementedError(
            f"[initialize] {', '.join(scripts)}: stage 3 does not serve modules of torch.jit, whose parameters cannot "
            "be gathered while they run; use the modules that they were made of, or stage 0, 1 or 2"
        )


def _check_not_wrapped(model: nn.Module) -> None:
    """ConfigError for a module that others train over ranks."""
    wrappers: tuple[type, ...] = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
        wrappers += (fsdp.FullyShardedDataParallel,)
    for path, module in model.named_modules():
        if isinstance(module, wrappers):
            raise ConfigError(
                f"[initialize] {path or 'the model'} is a {type(module).__name__}, which exchanges gradients as the "
                f"engine does: hand over what it wraps ({path + '.' if path else 'model.'}module)"
            )
