"""Qwen2.5-VL in two parts: the vision tower over ranks that share its tokens (Ulysses), and the language model. The
classes and their arithmetic are those of Transformers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from pictures import IDS, MERGE, PATCH, Batch
from tessera.sequence import SequenceAttention
from torch import nn
from torch.nn import functional as F
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision


def configuration(vision: int = 32, text: int = 64, depth: int = 2, layers: int = 2, heads: int = 4) -> Any:
    """`vision`, `text`: hidden sizes. Every second block of the tower looks at whole pictures, the others at windows of
    2 * 2 tokens."""
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(IDS),
            "hidden_size": text,
            "intermediate_size": 2 * text,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": _sections(text // heads)},
            "max_position_embeddings": 1 << 17,
        },
        vision_config={
            "depth": depth,
            "hidden_size": vision,
            "intermediate_size": 2 * vision,
            "num_heads": heads,
            "out_hidden_size": text,
            "fullatt_block_indexes": list(range(1, depth, 2)),
            "window_size": 2 * MERGE * PATCH,
        },
        image_token_id=IDS["<image>"],
        vision_start_token_id=IDS["<vision>"],
        vision_end_token_id=IDS["</vision>"],
        attn_implementation="sdpa",
    )


def _sections(head_dim: int) -> list[int]:
    """How many of a head's rotations turn with time, row and column."""
    time = head_dim // 8
    return [time, (head_dim // 2 - time) // 2, head_dim // 2 - time - (head_dim // 2 - time) // 2]


def whole_model(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Qwen2_5_VLForConditionalGeneration(config).train()


def whole_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Of the model in one piece."""
    return model(
        input_ids=batch.ids, pixel_values=batch.patches, image_grid_thw=batch.grid, labels=batch.labels, use_cache=False
    ).loss


class Tower(nn.Module):
    """The vision tower of `model`, on one of the ranks of `group`, which share the tokens of a batch of pictures: each
    has a part of them everywhere but in attention, where it has all and a part of the heads."""

    def __init__(self, model: Any, group: Any, rank: int, ranks: int) -> None:
        super().__init__()
        self.tower = model.model.visual
        self._rank, self._ranks = rank, ranks
        for block in self.tower.blocks:
            block.attn.forward = _Attention(block.attn, group)

    def forward(self, patches: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        """This rank's part of the tokens [tokens / ranks, text hidden size], window by window (order_of())."""
        tower = self.tower
        order, windows = tower.get_window_index(grid)
        mine = order[self._part(len(order))]
        unit = tower.spatial_merge_unit
        hidden = tower.patch_embed(patches.view(-1, unit, patches.size(-1))[mine].flatten(0, 1))
        angles = tower.rot_pos_emb(grid).unflatten(0, (-1, unit))[mine].flatten(0, 1)
        angles = torch.cat([angles, angles], -1)
        whole = [0, *(grid[:, 1] * grid[:, 2]).repeat_interleave(grid[:, 0]).cumsum(0).tolist()]
        cuts = {False: sorted(set(windows)), True: whole}
        for number, block in enumerate(tower.blocks):
            hidden = block(
                hidden,
                cu_seqlens=cuts[number in tower.fullatt_block_indexes],
                position_embeddings=(angles.cos(), angles.sin()),
            )
        return tower.merger(hidden)

    def _part(self, tokens: int) -> slice:
        if tokens % self._ranks:
            raise ValueError(f"{tokens} tokens cannot be dealt out evenly to {self._ranks} ranks")
        part = tokens // self._ranks
        return slice(self._rank * part, (self._rank + 1) * part)


class _Attention:
    """In place of an attention's forward: the same, around an exchange of the ranks' tokens for heads."""

    def __init__(self, module: Any, group: Any) -> None:
        self._module = module
        self._exchange = SequenceAttention(_windows, group)

    def __call__(self, hidden_states: torch.Tensor, cu_seqlens: Any, position_embeddings: Any, **_: Any) -> Any:
        module = self._module
        tokens = hidden_states.size(0)
        q, k, v = module.qkv(hidden_states).view(tokens, 3, module.num_heads, -1).unbind(1)
        q, k = apply_rotary_pos_emb_vision(q, k, *position_embeddings)
        mixed = self._exchange(q[None], k[None], v[None], cu_seqlens, module.scaling)
        return module.proj(mixed.reshape(tokens, -1))


def _windows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cuts: list[int], scaling: float) -> torch.Tensor:
    """Attention inside each window; [1, tokens, heads, head_dim]."""
    lengths = [end - begin for begin, end in pairwise(cuts)]
    parts = zip(*(t.transpose(1, 2).split(lengths, 2) for t in (q, k, v)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*part, scale=scaling) for part in parts], 2).transpose(1, 2)


class Language(Qwen2_5_VLForConditionalGeneration):
    """The model without its vision tower, whose tokens it is given."""

    def forward(  # type: ignore[override]
        self, images: torch.Tensor, ids: torch.Tensor, grid: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """The loss. `images` [tokens of all pictures, hidden size]: as Tower gives them, of all ranks."""
        embeds = self.get_input_embeddings()(ids)
        back = torch.argsort(order_of(self.config, grid))
        mask = (ids == self.config.image_token_id).unsqueeze(-1)
        embeds = embeds.masked_scatter(mask, images[back].to(embeds.dtype))
        positions, _ = self.model.get_rope_index(ids, grid)
        return super().forward(inputs_embeds=embeds, position_ids=positions, labels=labels, use_cache=False).loss


def language_of(model: Any) -> Language:
    """Takes the vision tower out of a whole model."""
    model.model.visual = None
    model.__class__ = Language
    return model


def order_of(config: Any, grid: torch.Tensor) -> torch.Tensor:
    """Which token of the pictures comes where, window by window."""
    side = config.vision_config.window_size // MERGE // PATCH
    order, first = [], 0
    for _, height, width in (grid // torch.tensor([1, MERGE, MERGE])).tolist():
        numbers = first + torch.arange(height * width).view(height, width)
        rows = [numbers[i : i + side, j : j + side] for i in range(0, height, side) for j in range(0, width, side)]
        order += [row.flatten() for row in rows]
        first += height * width
    return torch.cat(order)
