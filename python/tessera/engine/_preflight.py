"""What an engine refuses of a module, before it touches anything. (What it refuses of parameters the core knows.)"""

from __future__ import annotations

import torch
from torch import nn

from tessera.errors import ConfigError


def check_modules(model: nn.Module, partitions: bool) -> None:
    """ConfigError for modules without shapes; NotImplementedError for what parameters cannot be partitioned in."""
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
    if partitions and scripts:
        raise NotImplementedError(
            f"[initialize] {', '.join(scripts)}: stage 3 does not serve modules of torch.jit, whose parameters cannot "
            "be gathered while they run; use the modules that they were made of, or stage 0, 1 or 2"
        )
