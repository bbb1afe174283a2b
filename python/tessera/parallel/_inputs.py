"""Checks that ranks of a tensor-parallel group, which compute one batch together, were given the same, and explains
shape errors of theirs."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tessera import _core
from tessera.errors import ConfigError
from tessera.parallel._modules import cut_of


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{name}[{number}]")
    else:
        yield name, value


def _digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        known = isinstance(value, (bool, int, float, str, type(None)))
        return repr(value) if known else type(value).__name__
    if value.layout != torch.strided or value.is_meta:
        return f"{value.layout} {tuple(value.shape)}"
    data = value.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    held = (ctypes.c_char * data.numel()).from_address(data.data_ptr())  # not by way of numpy, which torch does without
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(held).hexdigest()}"


def check_same_inputs(args: Any, kwargs: Any, group: _core.Group, device: torch.device) -> None:
    """AssertionError on all ranks where a value differs. Collective."""
    digests = {name: _digest(value) for source in (("", args), ("", kwargs)) for name, value in _leaves(source[1], "")}
    text = "\n".join(f"{name}\t{digest}" for name, digest in digests.items()).encode()
    texts = _gather_text(text, group, device)
    others = [dict(line.split("\t", 1) for line in other.decode().split("\n") if line) for other in texts]
    for rank, other in enumerate(others):
        names = [name for name in {**others[0], **other} if others[0].get(name) != other.get(name)]
        assert not names, (
            f"Data inconsistency within the TP group: {', '.join(names)} of the first forward differs between rank 0 "
            f"and rank {rank} of the {group.size} that hold slices of one model (tensor_parallel.autotp_size). "
            "Give them the same batch: a sampler counts data-parallel ranks (engine.dp_world_size, "
            "engine.dp_rank), not all"
        )


def _gather_text(text: bytes, group: _core.Group, device: torch.device) -> list[bytes]:
    sizes = torch.zeros(group.size, dtype=torch.int64, device=device)
    group.all_gather(sizes, torch.tensor([len(text)], device=device), "sizes of the description of inputs")
    longest = int(sizes.max().item())
    sent = torch.zeros(longest, dtype=torch.uint8)
    sent[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else sent[:0]
    rows = torch.zeros(group.size * longest, dtype=torch.uint8, device=device)
    if longest:
        group.all_gather(rows, sent.to(device), "description of inputs")
    table = rows.view(group.size, longest).cpu()
    return [bytes(row[:size].tolist()) for row, size in zip(table, sizes.tolist(), strict=True)]


def explain_sizes(model: nn.Module, error: BaseException) -> ConfigError | None:
    """Explains a shape error of a forward of a cut model, where a slice of a column layer's outputs went into a
    layer that is whole, or this rank has none; None where that is not seen."""
    empty = isinstance(error, ZeroDivisionError) or "0 elements" in str(error)
    if empty and (path := _empty_column(model)) is not None:
        return ConfigError(
            f"[tensor_parallel] this rank has no outputs of {path}, and the model's code cannot compute without a head "
            f"({error}); use a smaller autotp_size"
        )
    about_sizes = type(error) is RuntimeError and ("shape" in str(error) or "size" in str(error))
    where = _innermost(model, error) if about_sizes else None
    if where is None:
        return None
    path, module, widths = where
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() == 0 or cut_of(module) is not None:
        return None
    wanted = weight.size(0 if type(module).__name__ == "Conv1D" else -1)
    cuts = {name: cut for name, inner in model.named_modules() if (cut := cut_of(inner)) is not None}
    columns = [(name, cut) for name, cut in cuts.items() if cut.kind == "column" and not cut.gather]
    columns.sort(key=lambda item: -_shared(path, item[0]))  # the nearest first
    for name, cut in columns:
        own = cut.own_weight()
        total, mine = own.sizes[own.dim], own.length(cut.ranks.rank)
        came = next((width for width in widths if width < wanted and width * total == wanted * mine), None)
        if came is not None:
            return ConfigError(
                f"[tensor_parallel] {path} is whole and takes {wanted} features, and {came} came in: {name} is cut, "
                f"and a rank has {mine} of its {total} outputs ({cut.rule}); in tensor_parallel.partition_config give "
                f"{path} a rule with partition_type row, or that of {name} gather_output"
            )
    return None


def _empty_column(model: nn.Module) -> str | None:
    for path, module in model.named_modules():
        cut = cut_of(module)
        if cut is not None and cut.kind == "column" and cut.own_weight().length(cut.ranks.rank) == 0:
            return path
    return None


def _shared(first: str, second: str) -> int:
    """How many components two paths begin with alike."""
    pairs = zip(first.split("."), second.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


_Place = tuple[str, nn.Module, list[int]]


def _innermost(model: nn.Module, error: BaseException) -> _Place | None:
    """The module of the model that `error` came from, and the last sizes of the tensors that its code had at hand."""
    paths = {id(module): path for path, module in model.named_modules()}
    found: _Place | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in paths:
            tensors = [v for v in frame.f_locals.values() if isinstance(v, torch.Tensor) and v.dim() > 0]
            found = (paths[id(module)], module, [tensor.size(-1) for tensor in tensors])
    return found
