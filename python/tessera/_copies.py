"""Values of a module in memory: copies that share none with it, and buffers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


def own_copies(state: Mapping[str, Any]) -> dict[str, Any]:
    """Each tensor of a state dict copied, in its shape and strides, with no more memory than they span. What is one
    view of one memory (tied weights) stays one."""
    copies: dict[Any, torch.Tensor] = {}
    for value in state.values():
        if isinstance(value, torch.Tensor) and _view_of(value) not in copies:
            copies[_view_of(value)] = _copy(value)
    return {
        name: copies[_view_of(value)] if isinstance(value, torch.Tensor) else value for name, value in state.items()
    }


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and tensor.numel() > 0


def _view_of(tensor: torch.Tensor) -> Any:
    if not _has_memory(tensor):
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if not _has_memory(tensor) or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor in which elements that expand() repeats are there once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, min(tensor.size(dim), 1))
    return tensor


def cast_buffers(module: nn.Module, dtype: torch.dtype | None, in_fp32: Iterable[str] = ()) -> None:
    """Casts buffers to `dtype`, where that is given, and those whose names have one of the patterns `in_fp32` to fp32;
    in place: holders of a buffer see it."""
    kept = [re.compile(pattern.replace("*", ".*")) for pattern in in_fp32]
    for name, buffer in module.named_buffers():
        to = torch.float32 if any(pattern.search(name) for pattern in kept) else dtype
        if buffer.is_floating_point() and to is not None:
            buffer.data = buffer.data.to(to)


def named_for_fp32(module: nn.Module, in_fp16: bool) -> list[str]:
    """Patterns of what models of Transformers in `module` want in fp32, for cast_buffers()."""
    found: dict[str, None] = {}
    for path, child in module.named_modules():
        names = [*(getattr(child, "_keep_in_fp32_modules_strict", None) or ())]
        names += (getattr(child, "_keep_in_fp32_modules", None) or ()) if in_fp16 else ()
        found.update(dict.fromkeys(f"^{re.escape(path)}\\.*{name}" if path else name for name in names))
    return list(found)
