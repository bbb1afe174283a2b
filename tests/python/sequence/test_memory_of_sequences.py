"""The peak of activations of a long sequence is the formula of docs/sequence_parallel.md."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from support import run_mesh
from tessera.sequence import SequenceParallelGroups, TransformersAttention, tiled_loss, tiled_mlp
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import tessera

LAYERS, WIDTH, INNER, HEADS, KEYS, HEAD_DIM, VOCABULARY = 2, 128, 256, 8, 4, 16, 64
SP, TOKENS, TILE = 4, 512, 16  # ranks, tokens of the shorter sequence, tokens of a tile


def formula(tokens: int, tiled: bool) -> int:
    """Bytes of activations in fp32 on a rank with this many tokens of a Llama under activation checkpointing."""
    attention = 3 * HEADS * HEAD_DIM + 2 * KEYS * HEAD_DIM
    return 4 * tokens * ((LAYERS + 10) * WIDTH + attention if tiled else (LAYERS + 8) * WIDTH + attention + 6 * INNER)


def build() -> nn.Module:
    torch.manual_seed(0)
    options = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        head_dim=HEAD_DIM,
        max_position_embeddings=8 * TOKENS,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(options).train()
    model.gradient_checkpointing_enable()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model


def head(model: nn.Module, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.lm_head(hidden).float().flatten(0, 1), labels.flatten())


def step(model: nn.Module, ids: torch.Tensor, position_ids: torch.Tensor, tiles: int) -> None:
    if tiles:
        for layer in model.model.layers:
            plain = type(layer.mlp).forward
            layer.mlp.forward = lambda x, mlp=layer.mlp, plain=plain: tiled_mlp(lambda t: plain(mlp, t), x, tiles)
        hidden = model.model(input_ids=ids, position_ids=position_ids).last_hidden_state
        loss = tiled_loss(lambda x, labels: head(model, x, labels), hidden, ids, tiles=tiles)
    else:
        hidden = model.model(input_ids=ids, position_ids=position_ids).last_hidden_state
        loss = head(model, hidden, ids)
    del hidden
    loss.backward()


def peak_of(work: Any) -> int:
    """Bytes that the thread held at most of those that it allocated meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        work()
    now = most = 0
    for event in measured.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def peak(length: int, tiled: bool) -> int:
    """On the first of SP ranks."""
    model, tokens = build(), length // SP
    copies = [copy.deepcopy(model) for _ in range(SP)]
    ids = torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))

    def body(rank: int, mesh: tessera.Mesh) -> int:
        sp = mesh.group(tessera.Axis.Sp)
        groups = SequenceParallelGroups(sp, tessera.single_group(), sp)
        TransformersAttention.register_with_transformers(copies[rank], "sdpa", SP, 1, groups=groups)
        begin = rank * tokens
        mine = ids[:, begin : begin + tokens].clone()
        position_ids = torch.arange(begin, begin + tokens)[None]
        tiles = tokens // TILE if tiled else 0
        work = lambda: step(copies[rank], mine, position_ids, tiles)  # noqa: E731
        if rank == 0:
            return peak_of(work)
        work()
        return 0

    return run_mesh(body, sp=SP)[0]


@pytest.mark.parametrize("tiled", [True, False])
def test_the_peak_is_the_formula(tiled: bool) -> None:
    longer = peak(8 * TOKENS, tiled)
    assert longer == pytest.approx(formula(8 * TOKENS // SP, tiled), rel=0.1)
    assert longer < 8 * peak(TOKENS, tiled)  # what does not grow with the length is in the shorter one, too
