"""Packed sequences and sliding windows: as attention with the mask written out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tessera.sequence import _documents
from tessera.sequence._documents import attend, documents
from torch.nn import functional as F

LENGTH = 20


def positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def core(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scaling: float) -> Any:
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scaling)
    return out.transpose(1, 2), None


def dense(tensors: list[torch.Tensor], position_ids: torch.Tensor, window: int | None) -> torch.Tensor:
    index = torch.arange(LENGTH)
    number = torch.nn.functional.pad((position_ids.diff(dim=1) != 1).cumsum(1), (1, 0))
    mask = (index[:, None] >= index) & (number[:, :, None] == number[:, None])
    if window is not None:
        mask &= index[:, None] - index < window
    return core(None, *tensors, mask[:, None], scaling=0.7)[0]


ROWS = {
    "one": [positions(20), positions(20)],
    "alike": [positions(7, 1, 12), positions(7, 1, 12)],
    "different": [positions(7, 13), positions(20)],
    "padded": [torch.cat([positions(15), torch.zeros(5, dtype=torch.long)]), positions(4, 16)],
}


@pytest.mark.parametrize("window", [None, 1, 5, 6, 40])
@pytest.mark.parametrize("rows", ROWS)
def test_as_with_a_mask(rows: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_documents, "_BLOCK", 4)
    position_ids = torch.stack(ROWS[rows])
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 3, LENGTH, 4, generator=generator) for _ in range(3)]
    found = documents(position_ids)
    assert len(found) == (2 if rows in ("different", "padded") else 1)
    got = attend(core, SimpleNamespace(), (tensors[0], tensors[1], tensors[2]), found, window, scaling=0.7)
    torch.testing.assert_close(got, dense(tensors, position_ids, window))
