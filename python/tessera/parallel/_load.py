"""This rank's slices from safetensors files, of which only they are read."""

from __future__ import annotations

import inspect
import mmap
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tessera import _core
from tessera.errors import ConfigError, IoError
from tessera.parallel._apply import cuts_of, ranks_of


class _File:
    """One file; its tensors are views of the mapped file."""

    def __init__(self, path: str) -> None:
        self._entries = {entry[0]: entry for entry in _core.safetensors_entries(path)}
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise IoError(f"[load_slices] cannot read '{path}': {error}") from None

    def names(self) -> list[str]:
        return list(self._entries)

    def tensor(self, name: str) -> torch.Tensor:
        _, dtype, shape, offset = self._entries[name]
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)


def _files_of(files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    if not isinstance(files, (str, os.PathLike)):
        return [os.fspath(file) for file in files]
    path = os.fspath(files)
    if not os.path.isdir(path):
        return [path]
    return sorted(os.path.join(path, name) for name in os.listdir(path) if name.endswith(".safetensors"))


def load_slices(
    model: nn.Module,
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    device: torch.device | str | None = None,
    rename: Callable[[str], str] = lambda name: name,
    strict: bool = True,
) -> list[str]:
    """Fills a model that shard_model() has cut, of the meta device or not, from safetensors files (or a folder of them)
    of the whole model; of each parameter only this rank's slice is read. Local.

    `rename`: from a name of the model's state dict to that in the files. `device`: where parameters go that are on the
    meta device (default: the CPU). Values are cast to the model's dtypes. Buffers that no file has are computed anew
    where a module without parameters is built from nothing but its configuration (rotary embeddings). Returns the names
    that no file has, and those of other buffers that are on the meta device still; ConfigError for them if `strict`,
    and for sizes that do not fit."""
    sources: dict[str, _File] = {}
    for path in _files_of(files):
        file = _File(path)
        sources.update(dict.fromkeys(file.names(), file))
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
            if rename(full) not in sources:
                missing.append(full)
                continue
            value = sources[rename(full)].tensor(rename(full))
            cut = cuts.get(id(tensor))
            if tuple(value.shape) != (cut.sizes if cut is not None else tuple(tensor.shape)):
                raise ConfigError(
                    f"[load_slices] '{full}' is {tuple(value.shape)} in the file, and the whole of it is "
                    f"{cut.sizes if cut is not None else tuple(tensor.shape)} in the model"
                )
            piece = value.clone() if cut is None else cut.take(value, ranks.rank)
            new = _fill(module, name, tensor, piece, device)
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
            "docs/tensor_parallel.md shows"
        )
    return [*missing, *empty]


def _compute(model: nn.Module, device: Any) -> tuple[set[str], list[str]]:
    """What is no parameter and on the meta device gets its values, where its module can be built anew. The names of
    what did, and of what did not."""
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
