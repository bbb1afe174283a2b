"""What classes say of their loss and of their heads, where weights do not."""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from support import config, run_mesh
from tessera.errors import ConfigError
from tiny_models import MODELS, NamedAttention, OwnLossModel, RegisteredAttention, own, text
from torch import nn

import tessera
from tessera.parallel import _classes, register_class


def settings(**section: Any) -> dict[str, Any]:
    return config() | {"tensor_parallel": {"autotp_size": 2, **section}}


def planned(model: nn.Module, **section: Any) -> tessera.parallel.ParallelPlan:
    return tessera.parallel.plan_for(model, settings(**section))


def build(model: nn.Module, **section: Any) -> None:
    """ConfigError of any rank."""

    def body(rank: int, mesh: tessera.Mesh) -> None:
        engine = tessera.Engine(copy.deepcopy(model), settings(**section), group=mesh)
        try:
            engine(**text(0))
        finally:
            engine.destroy()

    run_mesh(body, tp=2)


def llama(**attributes: Any) -> nn.Module:
    model = MODELS["llama"][0]()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


class Derived(tf.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Inheriting(tf.LlamaForCausalLM):
    pass


@pytest.mark.parametrize(
    ("make", "preset", "loss", "said"),
    [
        (llama, "llama", "_loss_function", "lm_head: _loss_function of LlamaForCausalLM takes the loss of slices"),
        (lambda: llama(__class__=Inheriting), "llama", "_loss_function", "_loss_function of Inheriting"),
        (lambda: llama(__class__=Derived), "llama", None, "warning: lm_head: .* not known how Derived takes its loss"),
        (lambda: llama(loss_function=max), "llama", None, "warning: lm_head: .* not known how LlamaForCausalLM takes"),
        (
            MODELS["t5"][0],
            None,
            None,
            "lm_head: logits are gathered, T5ForConditionalGeneration takes its loss of whole",
        ),
        (
            MODELS["own, vocabulary"][0],
            "chatglm",
            None,
            "warning: lm_head: .* not known how OwnLossModel takes its loss",
        ),
        (MODELS["own, vocabulary, registered"][0], "chatglm", "criterion", "criterion of RegisteredLossModel takes"),
    ],
    ids=range(7),
)
def test_the_plan_says_how_the_loss_is_taken(make: Any, preset: str | None, loss: str | None, said: str) -> None:
    rules = {} if preset is None else {"preset_model": preset}
    plan = planned(make(), vocab_parallel_lm_head=True, **rules)
    assert plan.loss == loss
    (line,) = [line for line in str(plan).splitlines() if " takes " in line]
    assert re.search(said, line), line
    without = planned(make(), **rules)
    assert without.loss is None and " takes " not in str(without)


def test_what_is_known_of_transformers_models() -> None:
    """Those that are known to call loss_function do, as their sources say."""
    wrong, known = [], 0
    for path in (Path(tf.__file__).parent / "models").glob("*/modeling_*.py"):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef) or not node.name.endswith(_classes._ASKS):
                continue
            forward = next((f for f in node.body if getattr(f, "name", "") == "forward"), None)
            if forward is not None and not node.name.startswith((*_classes._ASKS_NOT, "TF", "Flax")):
                known += 1
                calls = any(getattr(inner, "attr", "") == "loss_function" for inner in ast.walk(forward))
                wrong += [] if calls else [node.name]
    assert wrong == [] and known > 100


def test_a_loss_that_was_not_asked_for_is_an_error() -> None:
    class Silent(OwnLossModel):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            return tf.modeling_outputs.CausalLMOutput(loss=self.lm_head(self.embedding(input_ids)).mean())

    register_class(Silent, loss="criterion")
    with pytest.raises(ConfigError, match=r"Silent took its loss from logits of which this rank has a slice"):
        build(Silent(), preset_model="chatglm", vocab_parallel_lm_head=True)
    register_class(Silent, loss=None)
    build(Silent(), preset_model="chatglm", vocab_parallel_lm_head=True)


def test_attention_that_does_not_say_its_heads_is_warned_of() -> None:
    rules = MODELS["own, registered"][2]
    made = planned(own(8, 4, NamedAttention)(), **rules)
    (warning,) = made.warnings
    assert "layers.0.self_attention: no attribute of NamedAttention is known to count its heads" in warning
    assert warning in str(made)
    for name, (model, _, section) in MODELS.items():
        found = planned(model(), **section).warnings
        assert len(found) == (name == "own, vocabulary"), (name, found)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"heads": "none"}, r"Attention.none must be a positive integer, got None"),
        ({"heads": "nh", "widths": ["odd"]}, r"self_attention.odd is 7, of which 4 of 8 heads have no whole part"),
        ({"heads": "n h"}, "must be names of attributes"),
        ({"loss": 3}, "must be names of attributes"),
        ({"widths": "nw"}, "must be names of attributes"),
        ({"loss": "nh"}, r"Attention.nh cannot be called as a loss"),
    ],
)
def test_what_is_registered_is_checked(rule: dict[str, Any], message: str) -> None:
    class Attention(RegisteredAttention):
        odd = 7

    assert planned(own(8, 4, Attention)(), **MODELS["own, registered"][2]).warnings == []
    with pytest.raises(ConfigError, match=message):
        register_class(Attention, **rule)
        if "loss" in rule:
            _classes.loss_of(Attention(32, 8, 4))
        build(own(8, 4, Attention)(), **MODELS["own, registered"][2])


def test_rules_of_classes() -> None:
    class Other(RegisteredAttention):
        odd = 7

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    rules = MODELS["own, registered"][2]
    assert len(planned(own(8, 4, Other)(), **rules).warnings) == 1  # of another forward nothing is known
    assert register_class(Other, heads="nk", widths=["odd"]) is Other
    with pytest.raises(ConfigError, match=r"self_attention\.odd is 7, of which 2 of 4 heads have no whole part"):
        build(own(8, 4, Other)(), **rules)
    assert register_class(Other, heads="nk") is Other and planned(own(8, 4, Other)(), **rules).warnings == []
    assert planned(own(8, 4, RegisteredAttention)(), **rules).warnings == []
    with pytest.raises(ConfigError, match="no class of modules"):
        register_class(nn.Linear(2, 2), heads="x")  # type: ignore[type-var]
