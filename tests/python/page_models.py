"""A small Llama of Transformers and its data, for hidden code of pages (pages.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def Model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, use_cache=False))


def batch(seed: int, **more: Any) -> dict[str, Any]:
    ids = torch.randint(0, 128, (1, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "position_ids": torch.arange(16)[None], "labels": ids, **more}
