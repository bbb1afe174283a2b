"""Loads this rank's slices from safetensors files, of which nothing else is read."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tessera import _core
from tessera.errors import ConfigError
from tessera.parallel._apply import cuts_of, ranks_of


def _open(files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> _core.WeightReader:
    if isinstance(files, (str, os.PathLike)):
        return _core.WeightReader(os.fspath(files))
    return _core.WeightReader([os.fspath(file) for file in files])


def load_slices(
    model: nn.Module,
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    device: torch.device | str | None = None,
    rename: Callable[[str], str] = lambda name: name,
    strict: bool = True,
) -> list[str]:
    """Fills a model that shard_model() has cut, of the meta device or not, from safetensors of the whole model: files,
    an index, or a folder (of its index, where it has one); of each parameter only this rank's slice is read. Local.

    `rename`: from a name of the model's state dict to that in the files. `device`: where parameters go that are on the
    meta device (default: the CPU). Values are cast to the model's dtypes. Buffers that no file has are computed anew
    where a module without parameters is built from nothing but its configuration (rotary embeddings). Returns the names
    that no file has, and those of other buffers that are on the meta device still; ConfigError for them if `strict`,
    and for sizes that do not fit."""
    source = _open(files)
    cuts, ranks = cuts_of(model), ranks_of(model)
    missing: list[str] = []
    loaded: dict[int, nn.Parameter] = {}  # by id of what was there: ties
    for prefix, module in model.named_modules():
        persistent = (name for name in module._buffers if name not in module._non_persistent_buffers_set)
        for name in (*module._parameters, *persistent):
            tensor = module._parameters.get(name, module._buffers.get(name))
            full = f"{prefix}.{name}" if prefix else name
            if tensor is None:
                continue
            if id(tensor) in loaded:
                module._parameters[name] = loaded[id(tensor)]
                continue
            there = source.shape(rename(full))
            if there is None:
                missing.append(full)
                continue
            cut = cuts.get(id(tensor))
            whole = cut.sizes if cut is not None else tuple(tensor.shape)
            if tuple(there) != whole:
                raise ConfigError(
                    f"[load_slices] '{full}' is {tuple(there)} in the file, and the whole of it is {whole} in the model"
                )
            slices = () if cut is None else (cut.dim, cut.ranges[ranks.rank])
            new = _fill(module, name, tensor, source.read(rename(full), *slices), device)
            if isinstance(new, nn.Parameter):
                loaded[id(tensor)] = new
    missing = [name for name in missing if not _was_tied(model, name, loaded)]
    built, empty = _compute(model, device)
    missing = [name for name in missing if name not in built]
    empty = [name for name in empty if name not in missing]
    if missing and strict:
        raise ConfigError(f"[load_slices] no file has {', '.join(missing)}")
    if empty and strict:
        raise ConfigError(
            f"[load_slices] no file has, nor is it known how to compute, the buffers {', '.join(empty)} of the meta "
            "device: give them values before, or build the model with only its parameters on the meta device, as "
            "docs/tensor_parallel_weights.md shows"
        )
    return [*missing, *empty]


def _compute(model: nn.Module, device: Any) -> tuple[set[str], list[str]]:
    """Gives values to what is no parameter and on the meta device, where its module can be built anew. Returns the
    names of those that have got some, and of those that have not."""
    built: set[str] = set()
    empty: list[str] = []
    for prefix, module in model.named_modules():
        tensors = {**module._buffers, **vars(module)}  # some keep a second name of a buffer as a plain attribute
        names = [name for name, value in tensors.items() if isinstance(value, torch.Tensor) and value.is_meta]
        fresh = _built_anew(module, device) if names else None
        for name in names:
            value, full = getattr(fresh, name, None), f"{prefix}.{name}" if prefix else name
            if isinstance(value, torch.Tensor) and value.shape == tensors[name].shape:
                setattr(module, name, value.to(tensors[name].dtype))
                built.add(full)
            else:
                empty.append(full)
    return built, empty


def _built_anew(module: nn.Module, device: Any) -> nn.Module | None:
    """Another one, with values; None where more than its configuration would be needed, or much memory."""
    config = getattr(module, "config", None)
    arguments = set(inspect.signature(type(module)).parameters)
    if config is None or not {"config"} <= arguments <= {"config", "device"} or any(True for _ in module.parameters()):
        return None
    device = torch.device(device or "cpu")
    with device, torch.random.fork_rng(devices=[]):
        return type(module)(config, **({"device": device} if "device" in arguments else {}))


def _was_tied(model: nn.Module, full: str, loaded: dict[int, nn.Parameter]) -> bool:
    """A name of a parameter that was loaded by another one."""
    prefix, _, name = full.rpartition(".")
    module = model.get_submodule(prefix)
    param = module._parameters.get(name)
    if param is None or id(param) not in loaded:
        return False
    module._parameters[name] = loaded[id(param)]
    return True


def _fill(module: nn.Module, name: str, tensor: Any, value: torch.Tensor, device: Any) -> Any:
    with torch.no_grad():
        if not tensor.is_meta:
            return tensor.copy_(value)
        value = value.to(device=device or "cpu", dtype=tensor.dtype)
        if not isinstance(tensor, nn.Parameter):
            module._buffers[name] = value
            return value
        new = nn.Parameter(value, requires_grad=tensor.requires_grad)
        vars(new).update(vars(tensor))
        module._parameters[name] = new
        return new
