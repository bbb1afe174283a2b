"""The model of communication against what groups count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from support import engines
from test_models import settings
from tiny_models import LLAMA, MODELS, of, text

import tessera

WIDE = LLAMA | {"hidden_size": 96, "num_attention_heads": 24, "num_key_value_heads": 24}


@pytest.mark.parametrize("vocabulary", [False, True])
@pytest.mark.parametrize(
    ("tp", "replays", "regions"),
    [(tp, False, False) for tp in (2, 3, 4, 8)] + [(2, False, True), (2, True, True), (4, False, True)],
)
def test_a_step_sends_what_the_model_says(tp: int, replays: bool, regions: bool, vocabulary: bool) -> None:
    model = of("Llama", WIDE)().train()
    if replays:
        model.gradient_checkpointing_enable()
    options: dict[str, Any] = {"vocab_parallel": vocabulary, "recompute": replays, "sequence_parallel_norms": regions}
    want = tessera.parallel.cost(model, length=8, batch=2, tp=tp, dtype=torch.float32, **options)
    rules = {"preset_model": "llama"} | ({"vocab_parallel_lm_head": True} if vocabulary else {})

    def body(engine: tessera.Engine, rank: int) -> Any:
        engine(**text(0, length=8)).loss.backward()  # the first forward compares inputs
        group = engine.core.mesh().group(tessera.Axis.Tp)
        group.reset_stats()
        engine(**text(0, length=8)).loss.backward()
        return group.stats()

    assert "tp" in want.text()
    cfg = settings(tp, rules, tessera={"sequence_parallel_norms": regions})
    for stats in engines(model, {"tp": tp}, cfg, body):
        for operation, traffic in want.axes["tp"].items():
            counted = getattr(stats, operation)
            assert (counted.bytes, counted.calls) == (traffic.bytes, traffic.calls), operation


def test_from_a_configuration_alone() -> None:
    config = transformers.LlamaConfig(**LLAMA)
    one = tessera.parallel.cost(config, length=8, tp=2, dp=4, stage=3)
    assert one.text() == tessera.parallel.cost(of("Llama", LLAMA)(), length=8, tp=2, dp=4, stage=3).text()
    with pytest.raises(ValueError, match="does not say how many layers"):
        tessera.parallel.cost(torch.nn.Linear(2, 2), length=8)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("mixtral", "num_local_experts is 4"),
        ("qwen2_moe", "num_experts is 4"),
        ("deepseek_v3", "n_routed_experts is 4|num_local_experts is 4"),
    ],
)
def test_experts_are_refused_by_name(name: str, number: str) -> None:
    with pytest.raises(NotImplementedError, match=number):
        tessera.parallel.cost(MODELS[name][0](), length=8, tp=2)
