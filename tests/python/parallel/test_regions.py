"""Activations between blocks that are cut along the sequence: the whole model's numbers, a part of its activations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import engines, run_mesh
from test_cut_engines import REGIONS, adam
from test_models import assert_same, compare, settings, train, train_plain
from tiny_models import LLAMA, MODELS, of, text
from torch import nn

import tessera


@pytest.mark.parametrize(
    ("name", "tp", "more"),
    [
        ("llama", 2, {}),
        ("llama", 4, {}),
        ("llama", 3, {"length": 9}),
        ("llama", 2, {"stage": 1, "dp": 2}),
        ("qwen3", 2, {"stage": 2, "dp": 2, "replays": True}),
        ("llama, vocabulary", 2, {"stage": 3}),
        ("llama, vocabulary, tied", 4, {"replays": True}),
        ("llama", 2, {"rules": {"tp_overlap_comm": False}, "stage": 3, "replays": True}),
        ("llama, preset", 2, {}),
        ("qwen2", 4, {"stage": 1}),
        ("qwen3", 4, {"stage": 3}),
        ("mistral", 2, {"stage": 2}),
        ("phi3", 2, {}),
        ("gpt_neox", 4, {"stage": 3, "dp": 1}),
        ("bloom", 2, {}),
        ("mixtral", 2, {"stage": 1, "dp": 2}),
        ("mixtral, preset", 4, {"replays": True}),
        ("qwen2_moe, preset", 2, {"stage": 3, "replays": True}),
        ("qwen2_moe, preset", 4, {}),
        ("deepseek_v2", 2, {"stage": 2, "dp": 2}),
        ("deepseek_v2, whole q", 3, {"length": 9, "rules": {"preset_model": "deepseek_v2"}}),
        ("deepseek_v3", 2, {"replays": True}),
        ("deepseek_v3", 4, {"stage": 3}),
    ],
)
def test_models_compute_what_the_whole_ones_do(name: str, tp: int, more: dict[str, Any]) -> None:
    compare(name, tp, **{"length": 8, **more}, **REGIONS)


def kept(engine: tessera.Engine) -> dict[int, int]:
    """Bytes of what a forward keeps for the backward and has the width of the model, by storage."""
    found: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.dim() == 3 and t.size(-1) == LLAMA["hidden_size"]:
            found[t.untyped_storage().data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = engine(**text(0, length=8)).loss
    loss.backward()
    return found


@pytest.mark.parametrize("tp", [2, 4])
def test_what_lies_between_blocks_is_a_part(tp: int) -> None:
    model, head_input = of("Llama", LLAMA)(), 2 * 8 * LLAMA["hidden_size"] * 4
    body = lambda engine, rank: sum(kept(engine).values())  # noqa: E731
    whole = engines(model, {"tp": tp}, adam(tp), body)[0]
    for part in engines(model, {"tp": tp}, adam(tp, **REGIONS), body):
        assert part == (whole - head_input) // tp + head_input


def test_inputs_that_are_parts_are_not_cut_again() -> None:
    """activation_checkpointing.partition_activations cuts what all ranks hold alike."""
    model = of("Llama", LLAMA)().train()
    batches = [text(step, length=8) for step in range(2)]
    want = train_plain(copy.deepcopy(model), [[batch] for batch in batches])

    def body(engine: tessera.Engine, rank: int) -> Any:
        for layer in engine.module.model.layers:
            layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, engine.recompute
        return train(engine, batches)

    cfg = settings(2, {}, **REGIONS, activation_checkpointing={"partition_activations": True})
    for got in engines(model, {"tp": 2}, cfg, body):
        assert_same(got, want)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mixtral, preset, jitter", "type 'mixtral' .*(block_sparse_moe|mlp) has jitter_noise"),
        ("deepseek_v3, own plan", "self_attn, a DeepseekV3Attention, is whole beside the norms"),
        ("mixtral, preset, loss", "type 'mixtral' .*has output_router_logits, and the gradient"),
        ("olmo2", "type 'olmo2' .*self_attn.q_proj is neither a column nor a row layer directly in"),
        ("opt", r"type 'opt' .*layers of model.decoder.layers.0 are cut in the block itself"),
        ("codegen", "type 'codegen' .*its code is not known .*served are llama, mistral"),
        ("llama, more", "type 'llama' .*mlp.extra, a Linear, is whole inside a module that is cut"),
    ],
)
def test_models_that_are_refused_say_why(name: str, message: str) -> None:
    model, _, own = MODELS.get(name, MODELS["llama"])
    made = model()
    if "mixtral" in name:
        model, _, own = MODELS["mixtral, preset"]
        made = model()
        made.config.output_router_logits = "loss" in name
        layer = made.model.layers[0]
        moe = getattr(layer, "block_sparse_moe", None) or layer.mlp  # of Transformers 4, or 5
        moe.jitter_noise = 0.1 if "jitter" in name else 0.0
    if name == "llama, more":
        made.model.layers[0].mlp.extra = nn.Linear(2, 2)
        own = {"preset_model": "llama"}
    with pytest.raises(ValueError, match=message):
        tessera.parallel.plan_for(made, settings(2, own, **REGIONS))


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v2"])
def test_mixed_modules_without_gradients_and_with_a_loss_of_their_own(name: str) -> None:
    model, _, own = MODELS[name]
    made = model().eval()

    def body(engine: tessera.Engine, rank: int) -> Any:
        with torch.no_grad():
            found = [engine(**text(0, length=length)).logits for length in (7, 8)]
        if name == "mixtral":
            with pytest.raises(ValueError, match="output_router_logits is not served with tessera"):
                engine(**text(0, length=8), output_router_logits=True)
        return found

    for found in engines(made, {"tp": 2}, settings(2, own, **REGIONS), body):
        for length, logits in zip((7, 8), found, strict=True):
            torch.testing.assert_close(logits, made(**text(0, length=length)).logits)


def test_lengths_that_do_not_divide() -> None:
    def body(engine: tessera.Engine, rank: int) -> Any:
        with pytest.raises(ValueError, match=r"\[2, 7, 32\] cannot be cut into 2 equal parts .*pad the sequences"):
            engine(**text(0, length=7))
        with torch.no_grad():  # a step of generation
            odd = engine(**text(0, length=7)).logits
        engine(**text(0, length=8)).loss.backward()
        return odd

    model = of("Llama", LLAMA)()
    for odd in engines(model, {"tp": 2}, adam(2, **REGIONS), body):
        torch.testing.assert_close(odd, model(**text(0, length=7)).logits)


def test_a_key_that_could_not_hold_says_so(caplog: pytest.LogCaptureFixture) -> None:
    tessera.Engine(of("Llama", LLAMA)(), adam(1, **REGIONS)).destroy()
    assert "tessera.sequence_parallel_norms has no effect: the model is not cut" in caplog.text
    model = of("Llama", LLAMA)()
    copies = [copy.deepcopy(model) for _ in range(2)]

    def body(rank: int, mesh: tessera.Mesh) -> None:
        tp = mesh.group(tessera.Axis.Tp)
        tessera.parallel.shard_model(copies[rank], adam(2), group=tp)
        with pytest.raises(ValueError, match="the model was cut without it"):
            tessera.Engine(copies[rank], adam(2, **REGIONS), group=mesh)
        other = copy.deepcopy(model)
        plan = tessera.parallel.shard_model(other, adam(2, **REGIONS), group=tp)
        assert "activations from model.layers.0 to model.norm are cut along the sequence" in str(plan)
        for again in (other, copy.deepcopy(other)):
            engine = tessera.Engine(again, adam(2, **REGIONS), group=mesh)
            found = engine(**text(0, length=8)).loss
            torch.testing.assert_close(found, model(**text(0, length=8)).loss)
            engine.destroy()

    run_mesh(body, tp=2)
