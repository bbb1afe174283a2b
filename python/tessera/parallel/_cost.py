"""Costs: what a step sends along each axis of a mesh, from the sizes of a model of blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tessera import _core
from tessera.errors import ConfigError
from tessera.parallel._rules import facts_of_config, first_number

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # experts of a layer
_GATED = ("gate_proj", "gate_up_proj", "w3", "wi_1")  # layers that only gated MLPs have


def cost(
    model: object,
    *,
    length: int,
    batch: int = 1,
    micro_batches: int = 1,
    dp: int = 1,
    sp: int = 1,
    tp: int = 1,
    replicas: int = 1,
    stage: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    vocab_parallel: bool = False,
    recompute: bool = False,
    sequence_parallel_norms: bool = False,
    gated: bool | None = None,
) -> _core.Cost:
    """Bytes and messages of one step by axis: print(cost(...).text()). Nothing is sent, and no ranks are needed.

    model: an nn.Module with a configuration, or that configuration: one kind of block of attention and MLP, repeated.
    `batch`: sequences of a micro-batch of one data-parallel rank, of `length` tokens over all of sp. `replicas`: of
    hybrid sharding. `dtype`: of activations, parameters and gradients on their way. `recompute`: activation
    checkpointing of every block. `sequence_parallel_norms`: activations between blocks are cut over tp. `gated`: the
    MLP has a gate beside its up projection; default: as the model's modules or its activation say.
    NotImplementedError for models with experts."""
    config = getattr(model, "config", model)
    config = getattr(config, "text_config", None) or config
    for name in _EXPERTS:
        if first_number(config, name) > 1:
            raise NotImplementedError(
                f"[cost] {name} is {getattr(config, name)}: this counts one MLP a block, and a mixture of experts has "
                "other parameters and sends other bytes; it is not served"
            )
    facts = facts_of_config(config)
    stack = _core.BlockStack()
    stack.layers = first_number(config, "num_hidden_layers", "n_layer", "num_layers")
    stack.hidden, stack.heads, stack.kv_heads = facts.hidden, facts.heads, facts.kv_heads
    stack.head_dim, stack.vocabulary = facts.head_dim, facts.vocabulary
    stack.inner = first_number(config, "intermediate_size", "ffn_dim", "d_ff", "n_inner") or 4 * stack.hidden
    stack.gated = _gated(model, config) if gated is None else gated
    if stack.layers == 0 or stack.hidden == 0:
        raise ConfigError(f"[cost] {type(model).__name__} does not say how many layers it has, and of what width")
    training = _core.Training()
    axis = _core.Axis
    training.ranks = {axis.DpReplicate: replicas, axis.DpShard: dp, axis.Sp: sp, axis.Tp: tp}
    training.stage, training.batch, training.length, training.micro_batches = stage, batch, length, micro_batches
    training.activation_bytes = training.parameter_bytes = training.gradient_bytes = dtype.itemsize
    training.vocab_parallel, training.recompute = vocab_parallel, recompute
    training.sequence_regions = training.whole_ends = sequence_parallel_norms
    return _core.parallel_cost(stack, training)


def _gated(model: Any, config: Any) -> bool:
    if isinstance(model, nn.Module):
        return any(path.rpartition(".")[2] in _GATED for path, _ in model.named_modules())
    return getattr(config, "hidden_act", "") == "silu"
