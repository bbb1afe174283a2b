"""Ranks of a tensor-parallel group compute one batch together: a check that they were given the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tessera import _core


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
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data.numpy().tobytes()).hexdigest()}"


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
            "engine.get_data_parallel_rank()), not all"
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
