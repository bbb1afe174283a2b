"""Leaf modules: modules whose parameters are gathered and reduced as one, however their forward uses them (mixtures of
experts, where ranks route to different experts). A mark is the attribute `_z3_leaf` of a module."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
from torch import nn

from tessera import _core

__all__ = [
    "DEFAULT_LEAF_MODULE_CLASSES",
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

logger = logging.getLogger("tessera")

LEAF_MARK = "_z3_leaf"

DEFAULT_LEAF_MODULE_CLASSES: tuple[str, ...] = tuple(_core.LeafModule().classes)
"""The mixture-of-experts blocks that are leaves without being named."""

ClassOrName = type[nn.Module] | str


def _matches(module: nn.Module, wanted: ClassOrName) -> bool:
    """An instance of a class, or of a class with this bare or dotted name."""
    if isinstance(wanted, str):
        kind = type(module)
        return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return isinstance(module, wanted)


def _mark(
    model: nn.Module, wanted: Iterable[ClassOrName] | ClassOrName, flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    items = [wanted] if isinstance(wanted, (str, type)) else list(wanted)
    for item in items:
        assert isinstance(item, (str, type)), (
            f"[zero] leaf modules are given by class or class name, got {type(item).__name__}"
        )
    found = [module for module in model.modules() if any(_matches(module, item) for item in items)]
    if not found and raise_if_not_found:
        raise ValueError(f"[zero] no module of type {', '.join(map(str, items))} in the model")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def set_z3_leaf_module(module: nn.Module, flag: bool) -> None:
    """Marks one module, or takes its mark away. Marks count when the engine is built."""
    setattr(module, LEAF_MARK, flag)


def z3_leaf_module(module: nn.Module) -> bool:
    return bool(getattr(module, LEAF_MARK, False))


def z3_leaf_parameter(param: torch.Tensor) -> bool:
    """True for a parameter of a leaf module, once its engine is built."""
    return bool(getattr(param, LEAF_MARK, False))


def set_z3_leaf_modules(
    model: nn.Module, classes_or_names: Iterable[ClassOrName] | ClassOrName, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks modules by class (subclasses too) or class name, bare or "path.to.module.ClassName". Returns them.

    AssertionError for anything else; ValueError when nothing matches, unless raise_if_not_found is False."""
    return _mark(model, classes_or_names, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, classes_or_names: Iterable[ClassOrName] | ClassOrName, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Takes marks away; matches as set_z3_leaf_modules."""
    return _mark(model, classes_or_names, False, raise_if_not_found)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def _mark_paths(
    model: nn.Module, wanted: Iterable[str], flag: bool, strict: bool, matches: Callable[[str, str], bool], what: str
) -> tuple[list[nn.Module], list[str]]:
    items = [wanted] if isinstance(wanted, str) else list(wanted)
    found: list[nn.Module] = []
    missing = []
    for item in items:
        hits = [module for path, module in model.named_modules() if matches(path, item)]
        if not hits:
            missing.append(item)
        found += [module for module in hits if not any(module is other for other in found)]
    if missing and strict:
        raise ValueError(f"[zero] no module {what} {', '.join(missing)} in the model")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks by exact path, as in named_modules(). Returns the modules and the names that match nothing."""
    return _mark_paths(model, module_names, flag, raise_if_not_found, lambda path, name: path == name, "named")


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks by the end of the path. Returns the modules and the suffixes that match nothing."""
    return _mark_paths(model, suffixes, flag, raise_if_not_found, str.endswith, "whose path ends with")


def apply_config(model: nn.Module, section: _core.LeafModule) -> None:
    """Adds the marks of zero_optimization.leaf_module. What a user named and matches nothing is a warning."""
    for item in section.classes:
        if not set_z3_leaf_modules(model, [item], raise_if_not_found=False) and item not in DEFAULT_LEAF_MODULE_CLASSES:
            logger.warning("[zero] leaf_module.classes: no module of class %s in the model", item)
    _, names = set_z3_leaf_modules_by_name(model, section.names, raise_if_not_found=False)
    _, suffixes = set_z3_leaf_modules_by_suffix(model, section.name_suffixes, raise_if_not_found=False)
    for kind, missing in (("names", names), ("name_suffixes", suffixes)):
        for item in missing:
            logger.warning("[zero] leaf_module.%s: no module %s in the model", kind, item)


def apply_granularity(model: nn.Module, threshold: int) -> None:
    """Marks modules that are finer than `threshold`: parameters (elements) inside, divided by modules inside, its own
    included. Containers without a forward of their own and modules without others inside are left alone, and so is the
    model itself; 0 marks nothing. A threshold that marks nothing is a warning."""
    if threshold == 0:
        return
    found = False
    for module in model.modules():
        inside = sum(1 for _ in module.modules())
        if module is model or inside == 1 or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            continue
        elements = sum(param.numel() for param in module.parameters())
        if 0 < elements <= threshold * inside:
            set_z3_leaf_module(module, True)
            found = True
    if not found:
        logger.warning("[zero] stage3_module_granularity_threshold: no module is finer than %d", threshold)


def leaf_paths(model: nn.Module) -> list[str]:
    """Paths of the marked modules that are in no other marked module."""
    paths: list[str] = []
    for path, module in model.named_modules():
        if z3_leaf_module(module) and not any(path.startswith(f"{outer}.") for outer in paths):
            paths.append(path)
    return paths
