"""Tiny models of Transformers with random weights, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F

from tessera.parallel import register_class

Batch = dict[str, torch.Tensor]
VOCABULARY = 32


def text(step: int, rank: int = 0, length: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(100 * rank + step)
    ids = torch.randint(4, VOCABULARY, (2, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def pairs(step: int, rank: int = 0) -> Batch:
    ids = text(step, rank)["input_ids"]
    return {"input_ids": ids, "labels": ids.flip(1)}


def sounds(step: int, rank: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return {
        "input_features": torch.randn(2, 8, 16, generator=generator),
        "labels": text(step, rank)["input_ids"],
    }


def images(step: int, rank: int = 0) -> Batch:
    ids = text(step, rank, length=10)["input_ids"]
    ids[:, 1], ids[:, 2:6], ids[:, 6] = 1, 3, 2  # start, four image tokens, end
    generator = torch.Generator().manual_seed(100 * rank + step)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids < 4, -100),
        "pixel_values": torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
    }


LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
GPT = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48}
MPT = {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 32, "expansion_ratio": 2}
NO_DROPS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
DEEPSEEK = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}


def of(name: str, options: dict[str, Any], **more: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        config = getattr(tf, f"{name}Config")(**{**options, **more})
        head = "ForConditionalGeneration" if name in ("T5", "Whisper", "Qwen2_5_VL") else "ForCausalLM"
        head = "LMHeadModel" if name == "GPT2" else head
        model: nn.Module = getattr(tf, name + head)(config).float()
        for param in model.parameters():  # biases and norms too
            param.data += 0.02 * torch.randn_like(param)
        return model

    return make


class GlmBlock(nn.Module):
    """As ChatGLM's: query, key and value one after the other in one weight; gate and up in another."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden)
        self.self_attention = GlmAttention(hidden, heads)
        self.post_attention_layernorm = nn.LayerNorm(hidden)
        self.mlp = GlmMlp(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class GlmAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, hidden // heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.query_key_value(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for part in parts)
        return self.dense(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class GlmMlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(hidden, 2 * 48)
        self.dense_4h_to_h = nn.Linear(48, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.dense_h_to_4h(x).chunk(2, -1)
        return self.dense_4h_to_h(F.silu(gate) * up)


class PackedExperts(nn.Module):
    """Two experts in one tensor, each with half of the tokens; as Transformers 5 has them."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.config = tf.PretrainedConfig()
        self.config._experts_implementation = "grouped_mm"
        self.gate_up_proj = nn.Parameter(0.2 * torch.randn(2, 2 * inner, hidden))
        self.down_proj = nn.Parameter(0.2 * torch.randn(2, hidden, inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        ends = torch.tensor([len(tokens) // 2, len(tokens)], dtype=torch.int32)
        gate, up = F.grouped_mm(tokens, self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=ends).view_as(x)


class PackedBlock(GlmBlock):
    def __init__(self) -> None:
        super().__init__(32, 4)
        self.mlp = nn.ModuleDict({"experts": PackedExperts(32, 24)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp["experts"](self.post_attention_layernorm(x))


def packed() -> nn.Module:
    torch.manual_seed(0)
    return ChatGLMModel(PackedBlock)


class LearnedAttention(GlmAttention):
    """With a norm of each head and a temperature of all, under names that nothing knows."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__(hidden, heads)
        self.qn, self.temperature = nn.RMSNorm(self.head_dim), nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.query_key_value(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for part in parts)
        q = self.qn(q) * self.temperature
        return self.dense(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class LearnedBlock(GlmBlock):
    """A learned activation and a gain in the cut part of its MLP, which is in the block itself, beside norms; `how`
    else to compute that."""

    def __init__(self, hidden: int, heads: int, how: str = "") -> None:
        super().__init__(hidden, heads)
        self.how = how
        self.self_attention = LearnedAttention(hidden, heads)
        self.up, self.act, self.down = nn.Linear(hidden, 48), nn.PReLU(), nn.Linear(48, hidden)
        self.mlp, self.gain, self.scale = nn.Identity(), nn.Parameter(torch.tensor(0.7)), nn.Linear(hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        y = self.post_attention_layernorm(x)
        up = F.linear(y, self.up.weight) if self.how == "up" else self.up(y)
        up = self.gain * self.act(up) * (self.scale(y) if self.how == "beside" else 1)
        down = F.linear(up, self.down.weight) if self.how == "down" else self.down(up)
        return x + down * self.scale(y)


def learned(how: str = "") -> nn.Module:
    torch.manual_seed(0)
    return ChatGLMModel(lambda: LearnedBlock(32, 4, how))


def learned_rules(*whole: str, **more: Any) -> dict[str, Any]:
    specs = [
        *([{"patterns": list(whole), "partition_type": "skip", **more}] if whole else []),
        {"patterns": [r".*\.query_key_value"], "shape": [3, -1]},
        {"patterns": [r".*\.up"]},
        {"patterns": [r".*\.dense", r".*\.down"], "partition_type": "row"},
    ]
    return {"partition_config": {"layer_specs": specs}}


LEARNED = (r".*\.qn", r".*\.self_attention\.temperature$")


class ChatGLMModel(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = lambda: GlmBlock(32, 4)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.output_layer = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.output_layer(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return tf.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def chatglm() -> nn.Module:
    torch.manual_seed(0)
    return ChatGLMModel()


class PlainAttention(nn.Module):
    """As one writes it: attributes say how many heads there are, and no configuration does."""

    def __init__(self, hidden: int, heads: int, keys: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, hidden // heads
        self.q_proj, self.o_proj = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.k_proj, self.v_proj = (nn.Linear(hidden, keys * self.head_dim) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class NamedAttention(nn.Module):
    """Its code takes the numbers of heads from attributes that only its class can tell of."""

    def __init__(self, hidden: int, heads: int, keys: int) -> None:
        super().__init__()
        self.nh, self.nk, self.nw = heads, keys, hidden
        self.wq, self.wo = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.wk, self.wv = (nn.Linear(hidden, keys * hidden // heads) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (count, -1)).transpose(1, 2)
            for layer, count in ((self.wq, self.nh), (self.wk, self.nk), (self.wv, self.nk))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).reshape(*x.shape[:-1], self.nw))


class RegisteredAttention(NamedAttention):
    pass


register_class(RegisteredAttention, heads="nh", key_heads="nk", widths=["nw"])


class OwnLossModel(ChatGLMModel):
    """Calls an attribute of its own for its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = self.output_layer
        del self.output_layer

    def criterion(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(x)
        return tf.modeling_outputs.CausalLMOutput(loss=self.criterion(logits=logits, labels=labels), logits=logits)


class RegisteredLossModel(OwnLossModel):
    pass


register_class(RegisteredLossModel, loss="criterion")


def with_loss(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return kind()

    return make


def own(heads: int, keys: int, attention: Callable[..., nn.Module] = PlainAttention) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = chatglm()
        for layer in model.layers:
            layer.self_attention = attention(32, heads, keys)
        return model

    return make


def chatglm_with_config() -> nn.Module:
    model = chatglm()
    model.config = tf.PretrainedConfig(num_attention_heads=4, hidden_size=32, vocab_size=VOCABULARY)
    return model


QWEN_VL = {
    "text_config": {**LLAMA, "num_key_value_heads": 2, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "spatial_patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "image_token_id": 3,
    "vision_start_token_id": 1,
    "vision_end_token_id": 2,
    "video_token_id": 0,
}
WHISPER = {
    "vocab_size": VOCABULARY,
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_source_positions": 8,
    "max_target_positions": 16,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
NEOX = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}

GPT2_RULES = {
    "partition_config": {
        "layer_specs": [
            {"patterns": [r".*\.c_attn\.weight$"], "shape": [3, -1]},
            {"patterns": [r".*\.c_fc\.weight$"]},
            {"patterns": [r".*\.c_proj\.weight$"], "partition_type": "row"},
        ]
    }
}

OWN_RULES = {
    "partition_config": {
        "layer_specs": [
            {"patterns": [r".*\.[qkv]_proj\.weight$", r".*\.w[qkv]\.weight$"]},
            {"patterns": [r".*\.dense_h_to_4h\.weight$"], "shape": [2, -1]},
            {"patterns": [r".*\.(o_proj|wo|dense_4h_to_h)\.weight$"], "partition_type": "row"},
        ]
    }
}

PACKED_RULES = {
    "partition_config": {
        "layer_specs": [
            {"patterns": [r".*\.query_key_value\.weight$"], "shape": [3, -1]},
            {"patterns": [r".*experts\.gate_up_proj$"]},
            {"patterns": [r".*\.dense\.weight$", r".*experts\.down_proj$"], "partition_type": "row"},
        ]
    }
}

# name -> (model, batches, its section of the configuration beside autotp_size)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Batch], dict[str, Any]]] = {
    "llama": (of("Llama", LLAMA), text, {}),
    "llama, tied": (of("Llama", LLAMA, tie_word_embeddings=True), text, {}),
    "llama, preset": (of("Llama", LLAMA, num_key_value_heads=2), text, {"preset_model": "llama"}),
    "llama, vocabulary": (of("Llama", LLAMA), text, {"vocab_parallel_lm_head": True}),
    "llama, vocabulary, tied": (of("Llama", LLAMA, tie_word_embeddings=True), text, {"vocab_parallel_lm_head": True}),
    "qwen2": (of("Qwen2", LLAMA), text, {}),
    "qwen3": (of("Qwen3", LLAMA, head_dim=16), text, {}),
    "mistral": (of("Mistral", LLAMA, sliding_window=4), text, {}),
    "mixtral": (of("Mixtral", LLAMA, num_local_experts=4, num_experts_per_tok=2), text, {}),
    "mixtral, preset": (of("Mixtral", LLAMA, num_local_experts=4), text, {"preset_model": "Mixtral"}),
    "qwen2_moe": (of("Qwen2Moe", LLAMA, **MOE, shared_expert_intermediate_size=24), text, {}),
    "qwen2_moe, preset": (
        of("Qwen2Moe", LLAMA, **MOE, shared_expert_intermediate_size=24),
        text,
        {"preset_model": "qwen2"},
    ),
    "deepseek_v2": (of("DeepseekV2", LLAMA, **DEEPSEEK, q_lora_rank=16), text, {"preset_model": "deepseek_v2"}),
    "deepseek_v2, whole q": (of("DeepseekV2", LLAMA, **DEEPSEEK, q_lora_rank=None), text, {}),
    "deepseek_v3": (of("DeepseekV3", LLAMA, **DEEPSEEK, q_lora_rank=16), text, {"preset_model": "deepseek_v2"}),
    "deepseek_v3, own plan": (of("DeepseekV3", LLAMA, **DEEPSEEK, q_lora_rank=16), text, {}),
    "gpt_oss": (
        of("GptOss", LLAMA, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
        text,
        {},
    ),
    "gpt_oss, attention": (
        of("GptOss", LLAMA, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
        text,
        {"preset_model": "llama"},
    ),
    "phi3": (of("Phi3", LLAMA, num_key_value_heads=2), text, {"preset_model": "phi3"}),
    "phi3, own plan": (of("Phi3", LLAMA, num_key_value_heads=2), text, {}),
    "phi3, four keys": (of("Phi3", LLAMA), text, {"preset_model": "phi3"}),
    "olmo2": (of("Olmo2", LLAMA, num_key_value_heads=2), text, {}),
    "bloom": (of("Bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}), text, {}),
    "bloom, preset": (
        of("Bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
        text,
        {"preset_model": "bloom"},
    ),
    "chatglm": (chatglm, text, {"preset_model": "chatglm"}),
    "chatglm, with a configuration": (chatglm_with_config, text, {"preset_model": "chatglm"}),
    "packed experts": (packed, text, PACKED_RULES),
    "learned": (learned, text, learned_rules(*LEARNED)),
    "learned, summed by rules": (
        learned,
        text,
        learned_rules(*LEARNED, r".*\.act", r".*\.gain$", grad_allreduce=True),
    ),
    "apertus": (of("Apertus", LLAMA, num_key_value_heads=2, rope_scaling=None), text, {}),
    "own": (own(4, 4), text, OWN_RULES),
    "own, four keys": (own(8, 4), text, OWN_RULES),
    "own, registered": (own(8, 4, RegisteredAttention), text, OWN_RULES),
    "own, vocabulary": (with_loss(OwnLossModel), text, {"preset_model": "chatglm", "vocab_parallel_lm_head": True}),
    "own, vocabulary, registered": (
        with_loss(RegisteredLossModel),
        text,
        {"preset_model": "chatglm", "vocab_parallel_lm_head": True},
    ),
    "falcon": (of("Falcon", NEOX, new_decoder_architecture=True, num_kv_heads=2), text, {}),
    "falcon, all heads": (of("Falcon", NEOX, multi_query=False, bias=True), text, {}),
    "falcon, alibi": (of("Falcon", NEOX, multi_query=False, alibi=True), text, {}),
    "falcon, one key": (of("Falcon", NEOX, bias=True), text, {}),
    "gpt_bigcode": (of("GPTBigCode", GPT, **NO_DROPS), text, {}),
    "mpt": (of("Mpt", MPT), text, {}),
    "gpt_neox": (of("GPTNeoX", NEOX), text, {}),
    "opt": (of("OPT", NEOX, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0), text, {}),
    "gptj": (of("GPTJ", GPT, rotary_dim=4, **NO_DROPS), text, {}),
    "codegen": (of("CodeGen", GPT, n_head=8, rotary_dim=2, **NO_DROPS), text, {}),
    "codegen, uneven": (of("CodeGen", GPT, n_embd=48, n_head=12, rotary_dim=2, **NO_DROPS), text, {}),
    "gpt2, rules": (of("GPT2", GPT, **NO_DROPS), text, GPT2_RULES),  # Conv1D
    "t5": (of("T5", T5, feed_forward_proj="gated-gelu"), pairs, {}),
    "whisper": (of("Whisper", WHISPER), sounds, {}),
    "qwen2_5_vl": (of("Qwen2_5_VL", QWEN_VL), images, {}),
}
