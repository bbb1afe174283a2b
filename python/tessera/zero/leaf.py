"""Leaf modules: modules whose parameters are gathered and reduced as one, however their forward uses them (mixtures of
experts, where ranks route to different experts). A mark is the attribute `_z3_leaf` of a module."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from tessera import _core
from tessera.units import outline

__all__ = [
    "DEFAULT_LEAF_MODULE_CLASSES",
    "get_leaf_modules",
    "is_leaf_module",
    "is_leaf_parameter",
    "set_leaf_module",
    "set_leaf_modules",
    "set_leaf_modules_by_name",
    "set_leaf_modules_by_suffix",
    "unset_leaf_modules",
]

# DeepSpeed's name: programs written for it set and read the attribute themselves, on modules that either package marks.
LEAF_MARK = "_z3_leaf"

DEFAULT_LEAF_MODULE_CLASSES: tuple[str, ...] = tuple(_core.Config.from_json("{}").zero_optimization.leaf_module.classes)
"""The mixture-of-experts blocks that are leaves without being named."""

ClassOrName = type[nn.Module] | str


def _found(model: nn.Module, wanted: ClassOrName, by: _core.LeafBy = _core.LeafBy.Class) -> list[int]:
    """Numbers in model.modules(): instances of a class, or what the core matches with a text."""
    if isinstance(wanted, str):
        return _core.modules_matching(outline(model), by, wanted)
    return [number for number, module in enumerate(model.modules()) if isinstance(module, wanted)]


def _set(model: nn.Module, numbers: Iterable[int], flag: bool) -> list[nn.Module]:
    modules = list(model.modules())
    found = [modules[number] for number in numbers]
    for module in found:
        set_leaf_module(module, flag)
    return found


def _mark(
    model: nn.Module, wanted: Iterable[ClassOrName] | ClassOrName, flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    items = [wanted] if isinstance(wanted, (str, type)) else list(wanted)
    for item in items:
        assert isinstance(item, (str, type)), (
            f"[zero] leaf modules are given by class or class name, got {type(item).__name__}"
        )
    found = {number for item in items for number in _found(model, item)}
    if not found and raise_if_not_found:
        raise ValueError(f"[zero] no module of type {', '.join(map(str, items))} in the model")
    return _set(model, sorted(found), flag)


def set_leaf_module(module: nn.Module, flag: bool) -> None:
    """Marks one module, or takes its mark away. Marks count when the engine is built."""
    setattr(module, LEAF_MARK, flag)


def is_leaf_module(module: nn.Module) -> bool:
    """Whether the module was set as a leaf."""
    return bool(getattr(module, LEAF_MARK, False))


def is_leaf_parameter(param: torch.Tensor) -> bool:
    """True for a parameter of a leaf module, once its engine is built."""
    return bool(getattr(param, LEAF_MARK, False))


def set_leaf_modules(
    model: nn.Module, classes_or_names: Iterable[ClassOrName] | ClassOrName, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks modules by class (subclasses too) or class name, bare or "path.to.module.ClassName". Returns them.

    AssertionError for anything else; ValueError when nothing matches, unless raise_if_not_found is False."""
    return _mark(model, classes_or_names, True, raise_if_not_found)


def unset_leaf_modules(
    model: nn.Module, classes_or_names: Iterable[ClassOrName] | ClassOrName, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Takes marks away; matches as set_leaf_modules."""
    return _mark(model, classes_or_names, False, raise_if_not_found)


def get_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The leaf modules of a model."""
    return [module for module in model.modules() if is_leaf_module(module)]


def _mark_paths(
    model: nn.Module, wanted: Iterable[str], flag: bool, strict: bool, by: _core.LeafBy, what: str
) -> tuple[list[nn.Module], list[str]]:
    items = [wanted] if isinstance(wanted, str) else list(wanted)
    found = {item: _found(model, item, by) for item in items}
    missing = [item for item in items if not found[item]]
    if missing and strict:
        raise ValueError(f"[zero] no module {what} {', '.join(missing)} in the model")
    return _set(model, dict.fromkeys(number for item in items for number in found[item]), flag), missing


def set_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks by exact path, as in named_modules(). Returns the modules and the names that match nothing."""
    return _mark_paths(model, module_names, flag, raise_if_not_found, _core.LeafBy.Name, "named")


def set_leaf_modules_by_suffix(
    model: nn.Module, suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks by the end of the path. Returns the modules and the suffixes that match nothing."""
    return _mark_paths(model, suffixes, flag, raise_if_not_found, _core.LeafBy.Suffix, "whose path ends with")


def apply_config(model: nn.Module, config: _core.Config) -> list[str]:
    """Adds the marks of zero_optimization.leaf_module and stage3_module_granularity_threshold. Returns warnings: what a
    user named and matches nothing."""
    numbers, warnings = _core.configured_leaves(outline(model), config)
    _set(model, numbers, True)
    return warnings


def leaf_paths(model: nn.Module) -> list[str]:
    """Paths of the marked modules that are in no other marked module."""
    marked = [number for number, module in enumerate(model.modules()) if is_leaf_module(module)]
    return _core.outermost(outline(model), marked)
