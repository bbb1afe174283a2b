"""Weights for other tools: one file of the module's state dict, or several."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from tessera import _core
from tessera._copies import own_copies
from tessera.checkpoints import shard_bytes
from tessera.engine._on_all import on_all
from tessera.engine._run import Run


def export(run: Run, folder: str | os.PathLike[str], name: str, exclude_frozen: bool, limit: int | str | None) -> None:
    """`limit`: of a file; None: there is one. Collective."""
    with on_all(run.core):
        run._contents.check(run.module, "save_16bit_model")
    state = _module_state(run, exclude_frozen)
    if name.endswith(".safetensors") or limit is not None:
        size = sys.maxsize if limit is None else shard_bytes(limit)
        _core.export_weights(run.core, _rows(run, state), os.fspath(folder), name, size)
    else:
        _save_state_dict(run, state, os.path.join(folder, name))


def _module_state(run: Run, exclude_frozen: bool) -> dict[str, Any]:
    """module.state_dict() with the parameters themselves, which may have no data now."""
    state = run.module.state_dict(keep_vars=True)
    if exclude_frozen:
        for name, param in run.module.named_parameters(remove_duplicate=False):
            if not param.requires_grad:
                state.pop(name, None)
    return state


def _numbers(run: Run) -> dict[int, int]:
    return {id(spec.tensor): number for number, spec in enumerate(run.core.params())}


def _rows(run: Run, state: dict[str, Any]) -> list[tuple[list[str], int, torch.Tensor | None]]:
    """Rows as export_weights() takes them; values that are no tensors are left out."""
    numbers = _numbers(run)
    rows: dict[int, tuple[list[str], int, torch.Tensor | None]] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            number = numbers.get(id(value), -1)
            rows.setdefault(id(value), ([], number, None if number >= 0 else value.detach()))[0].append(name)
    return list(rows.values())


def _save_state_dict(run: Run, state: dict[str, Any], path: str) -> None:
    """torch.save() on rank 0; any object, tensors in their own form."""
    numbers = _numbers(run)
    weights = _core.LiveWeights(run.core)
    first = _core.checkpoint_place(run.core) == 0
    whole: dict[int, torch.Tensor] = {}  # rank 0's
    for key in dict.fromkeys(number for number in map(id, state.values()) if number in numbers):
        weight = weights.whole(numbers[key])
        if weight is not None:
            whole[key] = weight
    error = ""
    if first:
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            copies = own_copies({name: value for name, value in state.items() if id(value) not in whole})
            with _core.WholeFile(path) as made:
                with open(made.part, "wb") as file:  # a parameter's memory is its own (Note [Parameter storage])
                    torch.save({name: whole.get(id(value), copies.get(name)) for name, value in state.items()}, file)
                made.finish()
        except Exception as problem:
            error = f"[engine.save_16bit_model] cannot write '{path}': {problem}"
    _core.checkpoint_exchange(run.core, "", error)
