"""The tensors inside whatever a module returned."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree


def tensors_in(output: Any) -> list[torch.Tensor]:
    """All tensors of an output: nested tuples, lists and dicts, and objects one level deep. Never raises."""
    if isinstance(output, torch.Tensor):
        return [output]
    found: list[torch.Tensor] = []
    for leaf in _pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        else:
            found.extend(_tensors_of_object(leaf))
    return found


def may_hold_tensors(output: Any) -> bool:
    """Whether an output may hold tensors that tensors_in() does not find: a generator, a closure, an object of
    objects."""
    return not all(_is_plain(leaf) for leaf in _pytree.tree_leaves(output))


def _is_plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (int, float, complex, str, bytes))


def _tensors_of_object(leaf: Any) -> list[torch.Tensor]:
    if _is_plain(leaf):
        return []
    if isinstance(leaf, Mapping):  # subclasses of dict are leaves to pytree
        values = list(leaf.values())
    elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        values = [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
    else:
        values = list(getattr(leaf, "__dict__", {}).values())
    return [item for item in _pytree.tree_leaves(values) if isinstance(item, torch.Tensor)]
