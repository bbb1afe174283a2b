"""A Llama of plain layers, without rotary positions, for the benchmark of tensor and sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LlamaSizes:
    hidden: int = 512
    heads: int = 8
    keys: int = 4
    inner: int = 1408
    layers: int = 4
    vocabulary: int = 256
    batch: int = 2
    length: int = 256

    @property
    def config(self) -> SimpleNamespace:
        """As Transformers names it."""
        return SimpleNamespace(
            model_type="llama",
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.keys,
            head_dim=self.hidden // self.heads,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            vocab_size=self.vocabulary,
            hidden_act="silu",
        )


SIZES = {"small": LlamaSizes(64, 4, 2, 96, 2, 64, 2, 32), "10M": LlamaSizes()}


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[batch, sequence, heads, head_dim], causal."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, sizes: LlamaSizes, run: Attend) -> None:
        super().__init__()
        self.head_dim, self.run = sizes.hidden // sizes.heads, run
        widths = sizes.heads * self.head_dim, sizes.keys * self.head_dim
        self.q_proj = nn.Linear(sizes.hidden, widths[0], bias=False)
        self.k_proj = nn.Linear(sizes.hidden, widths[1], bias=False)
        self.v_proj = nn.Linear(sizes.hidden, widths[1], bias=False)
        self.o_proj = nn.Linear(widths[0], sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        out: torch.Tensor = self.o_proj(self.run(*heads).flatten(2))
        return out


class Mlp(nn.Module):
    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.down_proj = nn.Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, sizes: LlamaSizes, run: Attend) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(sizes.hidden), Attention(sizes, run)
        self.post_attention_layernorm, self.mlp = nn.RMSNorm(sizes.hidden), Mlp(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Stack(nn.Module):
    def __init__(self, sizes: LlamaSizes, run: Attend) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(Block(sizes, run) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.norm(x)
        return out


class Llama(nn.Module):
    """`run`: what the attention does with query, key and value."""

    def __init__(self, sizes: LlamaSizes, run: Attend = attend) -> None:
        super().__init__()
        self.config = sizes.config
        self.model = Stack(sizes, run)
        self.lm_head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.lm_head(self.model(tokens)).float().flatten(0, 1), labels.flatten())


def llama(sizes: LlamaSizes, run: Attend = attend) -> Llama:
    torch.manual_seed(0)
    return Llama(sizes, run)
