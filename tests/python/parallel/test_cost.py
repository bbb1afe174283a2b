"""The model of communication against what groups count."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from support import run_mesh
from test_models import settings
from tiny_models import LLAMA, MODELS, of, text

import tessera
from tessera import _core


@pytest.mark.parametrize("tp", [2, 3, 4, 8])
def test_a_step_sends_what_the_model_says(tp: int) -> None:
    model = of("Llama", LLAMA | {"hidden_size": 96, "num_attention_heads": 24, "num_key_value_heads": 24})()
    copies = [copy.deepcopy(model) for _ in range(tp)]
    want = tessera.parallel.cost(model, length=6, batch=2, tp=tp, dtype=torch.float32)

    def body(rank: int, mesh: tessera.Mesh) -> int:
        engine = tessera.Engine(copies[rank], settings(tp, {"preset_model": "llama"}), group=mesh)
        engine(**text(0)).loss.backward()  # the first forward compares inputs
        group = mesh.group(_core.Axis.Tp)
        group.reset_stats()
        engine(**text(0)).loss.backward()
        counted = group.stats().all_reduce.bytes
        engine.destroy()
        return counted

    assert "tp" in want.text()
    for counted in run_mesh(body, tp=tp):
        assert counted == want.axes["tp"]["all_reduce"].bytes


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
        ("deepseek_v3", "n_routed_experts is 4"),
    ],
)
def test_experts_are_refused_by_name(name: str, number: str) -> None:
    with pytest.raises(NotImplementedError, match=number):
        tessera.parallel.cost(MODELS[name][0](), length=8, tp=2)
