"""Rules from configurations, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest
from support import config
from tiny_models import LLAMA, MODELS, of
from torch import nn

import tessera


def planned(model: nn.Module, tp: int = 2, **section: Any) -> tessera.parallel.ParallelPlan:
    cfg = config() | {"tensor_parallel": {"autotp_size": tp, **section}}
    return tessera.parallel.plan_for(model, cfg)


def cut(plan: tessera.parallel.ParallelPlan) -> dict[str, str]:
    return {d.path: d.partition.name for d in plan.core.decisions}


def custom(*specs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"partition_config": {"layer_specs": list(specs), "use_default_specs": False, **more}}


COLUMN = {"patterns": [r".*\.[qkv]_proj\.weight$", r".*\.(gate|up)_proj\.weight$"], "partition_type": "Column"}
ROW = {"patterns": [r".*\.o_proj\.weight$", r".*\.down_proj\.weight$"], "partition_type": "ROW"}


def test_custom_rules_presets_and_the_models_own_plan_agree() -> None:
    model = MODELS["llama"][0]()
    want = cut(planned(model, preset_model="LLaMA"))
    assert len(want) == 14 and set(want.values()) == {"Column", "Row"}
    assert cut(planned(model, **custom(COLUMN, ROW))) == want
    own = cut(planned(model))
    assert own.pop("lm_head") == "Column"
    assert own == want


def test_sources_in_their_order() -> None:
    model = MODELS["llama"][0]()
    assert planned(model).source == "tp_plan"
    assert planned(model, preset_model="qwen2").source == "preset qwen2"
    assert planned(MODELS["bloom"][0]()).source == "heuristics"
    skip_o = {"patterns": [r".*\.o_proj\.weight$"], "partition_type": "skip"}
    both = planned(model, preset_model="llama", partition_config={"layer_specs": [skip_o]})
    assert both.source == "partition_config"
    assert "model.layers.0.self_attn.o_proj" not in cut(both)
    assert "model.layers.0.mlp.down_proj" in cut(both)
    alone = planned(model, preset_model="llama", **custom(COLUMN, ROW))
    assert len(cut(alone)) == 14


def test_model_types_choose_rules() -> None:
    llama = {**COLUMN, "model_types": ["LLAMA"]}
    other = {"patterns": [r".*_proj\.weight$"], "partition_type": "row", "model_types": ["qwen2"]}
    assert set(cut(planned(MODELS["llama"][0](), **custom(other, llama, ROW))).values()) == {"Column", "Row"}
    assert set(cut(planned(MODELS["qwen2"][0](), **custom(other, llama, ROW))).values()) == {"Row"}
    fused = {"patterns": [".*query_key_value"], "model_types": ["chat_glm"]}  # a model without a configuration
    assert set(cut(planned(MODELS["chatglm"][0](), **custom(fused))).values()) == {"Column"}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"preset_model": "lama"},
            "tensor_parallel.preset_model.*llama, bloom, chatglm, mixtral, deepseek_v2, qwen2, phi3",
        ),
        ({"partition_config": []}, "partition_config: must be an object"),
        ({"partition_config": {"layer_spec": []}}, "layer_spec: unknown key; did you mean .layer_specs"),
        ({"partition_config": {}}, "there is no rule"),
        (custom({}), r"layer_specs\[0\].patterns is empty"),
        (custom({"patterns": ["("]}), "'\\(' is no regular expression"),
        (custom({"patterns": ["x"], "partition_type": "diagonal"}), "partition_type must be one of column, row, skip"),
        (custom({"patterns": ["x"], "kind": 1}), r"layer_specs\[0\].kind: unknown key; known are patterns"),
        (custom(COLUMN, tp_size=3), r"partition_config.tp_size is 3; it must be 1 or .*\(2\)"),
        (custom(COLUMN, embedding_partition_dim=2), "embedding_partition_dim must be 0 or 1"),
        (custom({**COLUMN, "shape": 3}), r"layer_specs\[0\].shape must be a list"),
        (custom({**COLUMN, "shape": [3, -1], "partition_dim": 2}), "partition_dim 2 is out of range"),
        (custom({**COLUMN, "shape": [[1, 2], -1], "partition_dim": 1}), "nested tuple only allowed at partition_dim"),
        (custom({**COLUMN, "shape": [[], -1]}), "empty"),
        (custom({**COLUMN, "shape": [[1, [2]], -1]}), "no whole number"),
        (custom({**COLUMN, "shape": [-1, -1]}), "2 entries of -1"),
        (custom({**COLUMN, "shape": [0, -1]}), "sizes are positive or -1"),
        *((custom({**COLUMN, "shape": [wrong, -1]}), "no whole number") for wrong in ("3", 2.5, True)),
        (custom({**COLUMN, "shape": [[1, 2], [3, 4]]}), "nested tuple only allowed at partition_dim"),
        (custom({**COLUMN, "shape": [5, -1]}), "q_proj.*5 equal sub-parameters do not divide 32"),
        (custom({**COLUMN, "shape": [[8, 8], -1]}), "q_proj.*is of 16 outputs, the weight has 32"),
        (custom(COLUMN, strict_mode=True), "No matching spec.*o_proj"),
        (custom({"patterns": ["nothing"]}), "match"),
    ],
)
def test_what_is_wrong_is_named(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned(MODELS["llama"][0](), **section)


def test_nothing_that_is_cut_is_an_error() -> None:
    """Of weights that are tied one alone cannot be cut; a rule that says skip is another thing."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    second, first = (
        {"patterns": [f"{number}.weight"], "partition_type": kind} for number, kind in ((1, "row"), (0, "skip"))
    )
    with pytest.raises(
        ValueError, match=r"autotp_size is 2, and nothing of this model is cut.*tied weights stay whole"
    ):
        planned(model, **custom(second))
    assert not cut(planned(model, **custom(second, first)))


def test_gathering_a_packed_weight_is_not_served() -> None:
    with pytest.raises(NotImplementedError, match="gather_output with shape"):
        planned(MODELS["llama"][0](), **custom({**COLUMN, "shape": [2, -1], "gather_output": True}))


def test_styles_of_newer_plans() -> None:
    """Of Transformers 5."""
    model = of("Llama", LLAMA)()
    want = cut(planned(model))
    layers = {
        f"layers.*.{name}": style
        for style, names in {
            "colwise": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
            "rowwise_split_input": ("self_attn.o_proj", "mlp.down_proj"),
            "moe_tp_experts": ("mlp.experts",),
        }.items()
        for name in names
    }
    more = {"embed_tokens": "embedding_rowwise", "norm": "replicate"}
    model.config.base_model_tp_plan = {**layers, **more}
    assert cut(planned(model)) == want
    model.config.model_type = "codegen"  # whose plan cuts through its fused layer
    assert planned(model).source == "heuristics"
    experts = MODELS["gpt_oss"][0]()
    plan = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise", "gate_up_proj_bias": "grouped_gemm"}
    experts._tp_plan = {}
    experts.config.base_model_tp_plan = {f"layers.*.mlp.experts.{name}": style for name, style in plan.items()}
    made = planned(experts)
    found = {(d.path, d.param, d.partition.name) for d in made.core.decisions if d.path.endswith(".experts")}
    names = [f"model.layers.{number}.mlp.experts" for number in range(2)]
    kinds = (("gate_up_proj", "Column"), ("down_proj", "Row"))
    assert made.source == "tp_plan" and found == {(name, *kind) for name in names for kind in kinds}


def odd_plan() -> nn.Module:
    model = of("Llama", LLAMA)()
    model._tp_plan = {"model.layers.*.mlp.up_proj": "diagonal"}
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (odd_plan, r"style 'diagonal' \(model.layers.\*.mlp.up_proj\).*partition_config.*\"preset_model\": \"llama\""),
        (of("GPT2", {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}), "gpt2"),
    ],
)
def test_models_that_are_refused_say_why(model: Any, message: str) -> None:
    with pytest.raises((ValueError, AssertionError), match=message):
        planned(model())


def test_heads_that_cannot_be_dealt_out_are_refused_by_the_plan() -> None:
    assert "q_proj  x 2  column 32 = 16 + 8 + 8" in str(planned(MODELS["own"][0](), 3, **MODELS["own"][2]))
    with pytest.raises(ValueError, match=r"layers.0.self_attention: 4 heads in 96 rows .* rank 0 has 32 rows"):
        planned(MODELS["chatglm"][0](), 3, **custom({"patterns": [".*query_key_value"]}))


def test_fused_layers_that_a_rule_takes_for_one_are_warned_of() -> None:
    rule = {"patterns": [".*query_key_value"]}
    made = planned(MODELS["chatglm"][0](), **custom(rule, ROW))
    (warning,) = made.core.warnings
    assert "layers.0.self_attention.query_key_value (and 1 more) holds several" in warning and warning in str(made)
    for shape in ([3, -1], [1, -1]):
        assert planned(MODELS["chatglm"][0](), **custom({**rule, "shape": shape}, ROW)).core.warnings == []
    assert planned(MODELS["bloom"][0](), **custom(rule)).core.warnings == []  # head by head


def test_the_plan_can_be_read() -> None:
    text = str(planned(MODELS["llama"][0](), preset_model="llama"))
    assert "preset llama" in text and "self_attn.q_proj" in text
    assert len(text.splitlines()) < 25  # blocks are collapsed
