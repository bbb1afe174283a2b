"""Makes the core's rules from the configuration and what a model says of itself: which modules are cut, and how."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from tessera import _core
from tessera.errors import ConfigError
from tessera.parallel._attention import heads_of, key_heads_of


def matcher(pattern: str, where: str) -> Callable[[str], bool]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"[config] {where}: {pattern!r} is no regular expression: {error}") from None
    return lambda name: compiled.match(name) is not None


# ---------------------------------------------------------------- what a model says of itself


def text_config(model: nn.Module) -> Any:
    """model.config, or of several the one of the text."""
    config = getattr(model, "config", None)
    inner = getattr(config, "text_config", None)
    return config if inner is None else inner


def first_number(config: Any, *names: str) -> int:
    """The first of these attributes that is an integer; 0 without any."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0


# Parts of a model that have a configuration of their own, beside that of the text.
_PARTS = ("vision_config", "audio_config", "image_config")


def facts_of(model: nn.Module) -> _core.ModelFacts:
    facts = facts_of_config(text_config(model))
    facts.model_type = model_type(model)
    whole = getattr(model, "config", None)
    others = [getattr(whole, name) for name in _PARTS if getattr(whole, name, None) is not None]
    for path, module in model.named_modules():
        part = getattr(module, "config", None) if path else None
        if part is not None and any(part is other for other in others):
            facts.parts = {**facts.parts, path: facts_of_config(part)}
    if facts.heads == 0:
        facts.parts = {**_heads_of_modules(model), **facts.parts}
    return facts


def _heads_of_modules(model: nn.Module) -> dict[str, _core.ModelFacts]:
    """Facts of a model without a configuration, by attention module that says how many heads it has."""
    found: dict[str, _core.ModelFacts] = {}
    for path, module in model.named_modules():
        heads = heads_of(module)
        keys = key_heads_of(module, heads) if heads > 0 else 0
        if keys > 0:
            found[path] = facts = _core.ModelFacts()
            facts.heads, facts.kv_heads = heads, keys
    return found


def facts_of_config(config: Any) -> _core.ModelFacts:
    facts = _core.ModelFacts()
    facts.heads = first_number(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    facts.hidden = first_number(config, "hidden_size", "n_embd", "d_model")
    facts.vocabulary = first_number(config, "vocab_size")
    facts.head_dim = first_number(config, "head_dim", "d_kv", "kv_channels")
    if facts.head_dim == 0 and facts.heads > 0 and facts.hidden % facts.heads == 0:
        facts.head_dim = facts.hidden // facts.heads
    facts.kv_heads = _kv_heads(config, facts.heads)
    return facts


def _kv_heads(config: Any, heads: int) -> int:
    """Key/value heads; those of Falcon and its kind by their own switches."""
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    if getattr(config, "new_decoder_architecture", None) is False:
        return heads
    if getattr(config, "multi_query_attention", False):
        return first_number(config, "multi_query_group_num")
    return first_number(config, "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv") or heads


def model_type(model: nn.Module) -> str:
    """model.config.model_type, else from the name of the class: LlamaForCausalLM is a "llama"."""
    named = getattr(getattr(model, "config", None), "model_type", None)
    if isinstance(named, str) and named:
        return named.lower()
    name = re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", type(model).__name__)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


# ---------------------------------------------------------------- sources of rules


def rules_for(model: nn.Module, config: _core.Config, size: int) -> _core.PartitionRules:
    """The rules of the first source that is there: the configuration's rules or preset, the model's tp_plan,
    heuristics."""
    configured = _core.partition_rules(config, facts_of(model), size, matcher)
    if configured is not None:
        return configured
    rules = _core.PartitionRules()
    plan = tp_plan_of(model)
    if plan and model_type(model) not in _PLANS_LEFT:
        rules.rules = [rule for name, style in plan.items() for rule in _planned(name, style, model)]
        rules.source = "tp_plan"
    else:
        rules.source = "heuristics"
    return rules


def _rule(matches: Callable[[str], bool], pattern: str, source: str, partition: _core.Partition) -> _core.PartitionRule:
    rule = _core.PartitionRule()
    rule.matches, rule.pattern, rule.source, rule.partition = matches, pattern, source, partition
    return rule


# ---------------------------------------------------------------- Transformers' plan

# Style -> (partition, gather the output, sum the gradient).
_STYLES = {
    "colwise": (_core.Partition.Column, False, False),
    "colwise_rep": (_core.Partition.Column, True, False),
    "colwise_gather_output": (_core.Partition.Column, True, False),
    "rowwise": (_core.Partition.Row, False, False),
    "rowwise_rep": (_core.Partition.Row, False, False),  # of inputs that every rank has
    "rowwise_split_input": (_core.Partition.Row, False, False),  # the same
    "replicate": (_core.Partition.Skip, False, False),
    "local_colwise": (_core.Partition.Column, False, False),
    "local_rowwise": (_core.Partition.Row, False, False),  # the sum that `gather` of a module around it stands for
    "replicated_with_grad_allreduce": (_core.Partition.Skip, False, True),
}
# Experts in one tensor each, which plans deal out whole. Here each is cut, and the router works as in the whole model.
_EXPERTS = {"gate_up_proj": _core.Partition.Column, "down_proj": _core.Partition.Row}
_EXPERT_STYLES = ("grouped_gemm", "packed_colwise", "rowwise")
# Styles of modules around these, and of input embeddings, which tensor_parallel decides about: there is nothing to do.
_AROUND = (
    *("local", "gather", "ep_router", "ep_dispatch_experts", "moe_tp_experts", "moe_identity_expert"),
    *("embedding_rowwise", "embedding_colwise"),
)
# Model types whose plan cuts through a fused query, key and value, of whose layout heuristics know.
_PLANS_LEFT = ("codegen",)
# Low-rank projections that a norm follows, which some plans cut all the same: they stay whole.
_NEVER_CUT = ("q_a_proj", "kv_a_proj_with_mqa")


def tp_plan_of(model: nn.Module) -> dict[str, str]:
    """The plan of the configuration's base model, the class and the instance; what an instance only repeats with the
    path of its base model before it counts once."""
    plan: dict[str, str] = {}
    config = getattr(model, "config", None)
    for source in (config, getattr(config, "text_config", None)):
        base = getattr(source, "base_model_tp_plan", None)
        plan.update(base if isinstance(base, Mapping) else {})
    base_names = tuple(plan)
    for source in (getattr(type(model), "_tp_plan", None), vars(model).get("_tp_plan")):
        for name, style in source.items() if isinstance(source, Mapping) else ():
            if not any(name.endswith(f".{known}") and plan[known] == style for known in base_names):
                plan[name] = style
    return plan


def _planned(name: str, style: str, model: nn.Module) -> list[_core.PartitionRule]:
    last = name.rpartition(".")[2]
    if style in _AROUND or (style == "grouped_gemm" and last not in _EXPERTS) or last in _NEVER_CUT:
        return []  # biases follow their weights
    path = rf"(?:.*\.)?{re.escape(name).replace(re.escape('*'), '[^.]+')}"
    if style in _EXPERT_STYLES and last in _EXPERTS and re.search(rf"(?:^|\.)experts\.{last}$", name):
        return [_rule(matcher(f"{path}$", "tp_plan"), f"{name}: {style}", "tp_plan", _EXPERTS[last])]
    if style not in _STYLES:
        kind = model_type(model)
        preset = next((p for p in _core.preset_names() if kind.startswith(p)), None)
        also = f', or "preset_model": "{preset}"' if preset else ""
        raise ConfigError(
            f"[tensor_parallel] the model's tp_plan has the style {style!r} ({name}), which is not served (served: "
            f"{', '.join((*_STYLES, *_AROUND, 'grouped_gemm'))}); give rules in tensor_parallel.partition_config{also}"
        )
    partition, gather, summed = _STYLES[style]
    rule = _rule(matcher(rf"{path}\.weight$", "tp_plan"), f"{name}: {style}", "tp_plan", partition)
    rule.gather_output = gather
    rule.sum_gradient = summed
    return [rule]
