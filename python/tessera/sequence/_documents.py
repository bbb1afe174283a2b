"""Causal attention over packed sequences without a mask of the whole length: document by document, and where a sliding
window is shorter than the document, block by block of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Ranges = list[tuple[int, int]]
Attention = Callable[
    ..., tuple[torch.Tensor, Any]
]  # Transformers' layouts: [batch, heads, tokens, width] to [batch, tokens, heads, width]

_BLOCK = 256  # least number of queries that share a window's mask


def documents(position_ids: torch.Tensor) -> list[Ranges]:
    """Where the documents of each row of [rows, tokens] are; one entry where all rows are alike. A document begins at a
    token whose position is not the position before it plus 1."""
    starts = (position_ids[:, 1:] - position_ids[:, :-1] != 1).cpu()
    rows = []
    for row in starts:
        begins = [0, *(row.nonzero().flatten() + 1).tolist()]
        rows.append(list(zip(begins, [*begins[1:], position_ids.size(1)], strict=True)))
    return rows[:1] if all(row == rows[0] for row in rows) else rows


def attend(
    core: Attention,
    module: Any,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows: list[Ranges],
    window: int | None,
    **kwargs: Any,
) -> torch.Tensor:
    """core(module, query, key, value, mask, **kwargs) of every document by itself."""
    if len(rows) == 1:
        return _row(core, module, tensors, rows[0], window, kwargs)
    outputs = []
    for number, row in enumerate(rows):
        query, key, value = (t[number : number + 1] for t in tensors)
        outputs.append(_row(core, module, (query, key, value), row, window, kwargs))
    return torch.cat(outputs)


def _row(core: Attention, module: Any, tensors: Any, ranges: Ranges, window: int | None, kwargs: Any) -> torch.Tensor:
    outputs = []
    for begin, end in ranges:
        if window is None or end - begin <= window:
            query, key, value = (t if len(ranges) == 1 else t[:, :, begin:end] for t in tensors)
            outputs.append(core(module, query, key, value, None, **kwargs)[0])
            continue
        step = max(window, _BLOCK)
        for first in range(begin, end, step):
            last, oldest = min(first + step, end), max(begin, first - window + 1)
            query, (key, value) = tensors[0][:, :, first:last], (t[:, :, oldest:last] for t in tensors[1:])
            rows = torch.arange(first, last, device=query.device)[:, None]
            columns = torch.arange(oldest, last, device=query.device)
            mask = (columns <= rows) & (rows - columns < window)
            outputs.append(core(module, query, key, value, mask[None, None], **kwargs)[0])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
