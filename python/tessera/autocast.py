"""torch_autocast of the configuration: which parameters travel in the autocast dtype, and what engines log of it.

The state is each parameter's own (an attribute, `comm_dtype`, read when an engine is built) and each engine's; nothing
is process-wide.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn

from tessera import _core
from tessera.errors import ConfigError

__all__ = [
    "PARAM_COMM_DTYPE_ATTR_NAME",
    "autocast_if_enabled",
    "get_all_comm_dtypes",
    "get_comm_dtype",
    "get_default_autocast_lower_precision_modules",
    "has_autocast_dtype",
    "has_comm_dtype",
    "init_autocast_params",
    "is_autocast_initialized",
    "sort_dtypes",
]

PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"

_DEFAULT_CLASSES: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Dotted names of the classes whose parameters travel in the autocast dtype where the configuration names none."""
    return [f"{cls.__module__}.{cls.__name__}" for cls in _DEFAULT_CLASSES]


def _module_class(name: str) -> type[nn.Module]:
    path, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(path), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"Failed to import lower precision safe module {name!r}: {error}") from None
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise ConfigError(f"Failed to import lower precision safe module {name!r}: it is not a class of nn.Module")
    return found


def init_autocast_params(
    model: nn.Module, dtype: torch.dtype, torch_autocast_lower_precision_safe_modules: list[str] | None = None
) -> list[torch.Tensor]:
    """Marks the parameters owned by modules of exactly these classes (dotted names; not their subclasses, not modules
    inside them): their gradients, and in stage 3 their values, travel in `dtype`. Returns those that had no mark. An
    engine whose configuration enables torch_autocast does this itself, and takes these marks off when it is destroyed;
    marks of your own on other parameters hold for it too. ConfigError for a name that cannot be imported."""
    names = torch_autocast_lower_precision_safe_modules
    if names is None:
        names = get_default_autocast_lower_precision_modules()
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ConfigError("lower_precision_safe_modules must be a list of dotted class names")
    classes = {_module_class(name) for name in names}
    marked: list[torch.Tensor] = []
    for module in model.modules():
        if type(module) not in classes:
            continue
        for param in module.parameters(recurse=False):
            if not has_comm_dtype(param):
                marked.append(param)
            setattr(param, PARAM_COMM_DTYPE_ATTR_NAME, dtype)
    return marked


def is_autocast_initialized(model: nn.Module) -> bool:
    """A parameter of this module or engine is marked."""
    return any(has_comm_dtype(param) for param in model.parameters())


def has_comm_dtype(param: torch.Tensor) -> bool:
    """Whether the configuration gave the parameter a dtype of its own to travel in."""
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


has_autocast_dtype = has_comm_dtype


def get_comm_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype that the parameter travels in: its mark's, or its own."""
    return getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)


def get_all_comm_dtypes(params: Iterable[torch.Tensor]) -> set[torch.dtype]:
    """The dtypes that these parameters are reduced and gathered in."""
    return {get_comm_dtype(param) for param in params}


def sort_dtypes(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """Sorts by name: the same order on all ranks."""
    return sorted(dtypes, key=str)


class _Runs(Protocol):
    """An engine."""

    @property
    def core(self) -> _core.Engine: ...
    @property
    def device(self) -> torch.device: ...


def autocast_if_enabled(engine: _Runs) -> contextlib.AbstractContextManager[object]:
    """The autocast region that engine.forward runs the module in, for code beside it; nothing where the engine's
    configuration does not enable torch_autocast."""
    options = engine.core.options().autocast
    if not options.enabled:
        return contextlib.nullcontext()
    on = options.dtype is not torch.float32
    return torch.autocast(engine.device.type, dtype=options.dtype if on else None, enabled=on, cache_enabled=False)
