"""Units: which parameters are gathered, reduced and freed together. The rules are the core's (engine/unit_policy.h)."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.parameter import is_lazy

from tessera import _core

__all__ = ["UnitPolicy", "default_unit_policy"]

UnitPolicy = Callable[[nn.Module], dict[str, str]]
"""From a model to the unit name of each parameter name (as in named_parameters()); absent names join "root"."""

ROOT = "root"


def outline(model: nn.Module) -> _core.Outline:
    """The modules and parameters of `model` in the core's terms."""
    result = _core.Outline()
    for path, module in model.named_modules():
        kind = type(module)
        result.add_module(
            path,
            [f"{kind.__module__}.{kind.__qualname__}", kind.__name__],
            repeats=isinstance(module, (nn.ModuleList, nn.Sequential)),
            runs=not isinstance(module, (nn.ModuleList, nn.ModuleDict)),
        )
    for path, param in model.named_parameters(remove_duplicate=False):
        result.add_param(path, 0 if is_lazy(param) else param.numel(), id(param))
    return result


def default_unit_policy(model: nn.Module) -> dict[str, str]:
    """Every block that a ModuleList or Sequential repeats is a unit of its own; everything else is the unit "root".

    The outermost container that repeats wins, so a transformer's layers are units whole, whatever they contain.
    """
    return _core.default_units(outline(model))
