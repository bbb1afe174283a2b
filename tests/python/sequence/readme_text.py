"""Real text as tokens, and a tiny Llama, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

BATCH, LENGTH = 2, 32


def llama(heads: int = 8, keys: int = 8, implementation: str = "sdpa", **more: Any) -> nn.Module:
    torch.manual_seed(0)
    options = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=8 * heads,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        max_position_embeddings=64,
        attn_implementation=implementation,
        use_cache=False,
        **more,
    )
    return transformers.AutoModelForCausalLM.from_config(options)


def text_batch(number: int, documents: tuple[int, ...] = (LENGTH,)) -> dict[str, torch.Tensor]:
    """[BATCH, LENGTH] characters of the README, each row as documents of these lengths, without their first labels."""
    text = (Path(__file__).parents[3] / "README.md").read_bytes()
    begin = (number * BATCH * LENGTH) % (len(text) - BATCH * LENGTH)
    tokens = torch.tensor(list(text[begin : begin + BATCH * LENGTH])).clamp(max=127).view(BATCH, LENGTH)
    position_ids = torch.cat([torch.arange(length) for length in documents]).expand(BATCH, LENGTH)
    labels = tokens.masked_fill(position_ids == 0, -100)
    labels[0, : 5 * number] = -100
    return {"input_ids": tokens, "position_ids": position_ids.contiguous(), "labels": labels}


def shared_part(batch: dict[str, torch.Tensor], rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """What `rank` of those that share the sequence has of it, with the labels of the next token."""
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return {name: value.chunk(ranks, 1)[rank] for name, value in {**batch, "shift_labels": labels}.items()}


def plain_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
