"""Units: which parameters are gathered, reduced and freed together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import nn

UnitPolicy = Callable[[nn.Module], dict[str, str]]
"""From a model to the unit name of each parameter name (as in named_parameters()); absent names join "root"."""

ROOT = "root"


def default_unit_policy(model: nn.Module) -> dict[str, str]:
    """Every block that a ModuleList or Sequential repeats is a unit of its own; everything else is the unit "root".

    The outermost container that repeats wins, so a transformer's layers are units whole, whatever they contain.
    """
    units: dict[str, str] = {}
    _visit(model, "", units)
    return units


def _visit(module: nn.Module, prefix: str, units: dict[str, str]) -> None:
    repeats = isinstance(module, (nn.ModuleList, nn.Sequential)) and _repeats(module)
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if repeats:
            for param_name, _ in child.named_parameters(prefix=path):
                units[param_name] = path
        else:
            _visit(child, f"{path}.", units)


def _repeats(container: nn.Module) -> bool:
    kinds = Counter(type(child) for child in container.children() if next(child.parameters(), None) is not None)
    return any(count > 1 for count in kinds.values())


def partition_units(model: nn.Module, units: dict[str, str], leaves: list[str]) -> dict[str, str]:
    """For partitioned parameters: a leaf module is one unit, and what belongs to no unit is one with its module, so
    that it is whole only while that module runs. Parameters of the model itself stay in the root."""
    result: dict[str, str] = {}
    for name, _ in model.named_parameters():
        leaf = next((path for path in leaves if name.startswith(f"{path}.") or path == ""), None)
        owner = name.rpartition(".")[0]
        result[name] = leaf if leaf is not None else units.get(name, owner or ROOT)
    return result
