"""Packed sequences and sliding windows over ranks that share them: as attention with the mask written out."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from support import run_mesh
from test_transformers import register
from torch import nn

import tessera

LENGTH = 560  # windows have masks for 256 queries at least


def positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


ROWS = {
    "one": [positions(LENGTH), positions(LENGTH)],
    "alike": [positions(20, 1, LENGTH - 21), positions(20, 1, LENGTH - 21)],
    "different": [positions(7, LENGTH - 7), positions(LENGTH)],
    "padded": [torch.cat([positions(LENGTH - 8), torch.zeros(8, dtype=torch.long)]), positions(4, LENGTH - 4)],
}


def mistral(window: int | None) -> nn.Module:
    torch.manual_seed(0)
    options = transformers.MistralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=window,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return transformers.MistralForCausalLM(options)


def mask_of(position_ids: torch.Tensor, window: int | None) -> torch.Tensor:
    """[rows, 1, LENGTH, LENGTH]: what attends to what."""
    index = torch.arange(LENGTH)
    number = nn.functional.pad((position_ids.diff(dim=1) != 1).cumsum(1), (1, 0))
    mask = (index[:, None] >= index) & (number[:, :, None] == number[:, None])
    if window is not None:
        mask &= index[:, None] - index < window
    return mask[:, None]


@pytest.mark.parametrize("window", [None, 1, 100, 257, 600])
@pytest.mark.parametrize("rows", ROWS)
def test_as_with_a_mask(rows: str, window: int | None) -> None:
    position_ids, model = torch.stack(ROWS[rows]), mistral(window)
    tokens = torch.randint(64, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    want = model(tokens, position_ids=position_ids, attention_mask=mask_of(position_ids, window)).logits
    copies = [copy.deepcopy(model) for _ in range(2)]

    def body(rank: int, mesh: tessera.Mesh) -> torch.Tensor:
        register(copies[rank], mesh)
        mine = (t.chunk(2, 1)[rank].contiguous() for t in (tokens, position_ids))
        return copies[rank](next(mine), position_ids=next(mine)).logits.detach()

    torch.testing.assert_close(torch.cat(run_mesh(body, sp=2), 1), want, rtol=1e-4, atol=1e-5)
