"""Hugging Face models, tiny and with random weights, train in stage 3 as they do in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import config, engines, gathered
from torch import nn

import tessera
from tessera import checkpoints

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "attn_implementation": "eager",
}


def llama(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **more))


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    options = transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(options)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama, tied embeddings": lambda: llama(tie_word_embeddings=True),
    "mixtral": mixtral,
}


def tokens(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(10 * rank + step))


def plain_losses(model: nn.Module, world: int, steps: int) -> list[float]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum(model(input_ids=tokens(r, step), labels=tokens(r, step)).loss for r in range(world)) / world
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_plain_pytorch(name: str, checkpointing: bool) -> None:
    model = MODELS[name]()
    world, steps = 2, 4
    expected = plain_losses(model, world, steps)
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()

    def body(engine: tessera.Engine, rank: int) -> list[float]:
        losses = []
        for step in range(steps):
            loss = engine(input_ids=tokens(rank, step), labels=tokens(rank, step)).loss
            loss.backward()
            assert gathered(engine) == []
            engine.step()
            losses.append(loss.item())
        return losses

    adam = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}
    cfg = config(3, optimizer=adam, tessera={"min_unit_elements": 1})
    per_rank = engines(model, world, cfg, body)
    mean = [sum(losses) / world for losses in zip(*per_rank, strict=True)]
    torch.testing.assert_close(torch.tensor(mean), torch.tensor(expected), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_loads_what_an_engine_and_a_checkpoint_export(name: str, file: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    cfg = config(3, bf16=True, zero={"stage3_gather_16bit_weights_on_model_save": True}, optimizer=adam)

    def body(engine: tessera.Engine, rank: int) -> dict[str, torch.Tensor]:
        engine(input_ids=tokens(rank, 0), labels=tokens(rank, 0)).loss.backward()
        engine.step()
        assert engine.save_16bit_model(tmp_path / "live", file, max_shard_size="50KB")
        engine.save_checkpoint(tmp_path / "run")
        return engine.module_state_dict()

    weights = engines(model, 2, cfg, body)[0]
    checkpoints.export(
        tmp_path / "run", tmp_path / "saved", None, None, "50KB", safetensors=file.endswith("safetensors")
    )
    exact = checkpoints.state_dict(tmp_path / "run")
    for folder in ("live", "saved"):
        assert len(list((tmp_path / folder).iterdir())) > 2
        model.config.save_pretrained(tmp_path / folder)
        loaded, report = type(model).from_pretrained(tmp_path / folder, dtype=torch.bfloat16, output_loading_info=True)
        assert not any(report.values()), report
        state = loaded.state_dict()
        assert state.keys() == weights.keys()
        for key, value in weights.items():
            other = state[key] != value
            if folder == "live":
                assert not other.any(), key
                continue
            # The nearest to the master; in a tie, the weight of a split master may be the other neighbour.
            assert torch.equal(state[key], exact[key].to(value.dtype)), key
            there, here = ((v.double() - exact[key])[other].abs() for v in (state[key], value))
            assert torch.equal(there, here), key
