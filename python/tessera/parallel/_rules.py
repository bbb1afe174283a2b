"""From the configuration and what a model says of itself to the core's rules: which modules are cut, and how."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from tessera import _core
from tessera.errors import ConfigError
from tessera.parallel._attention import heads_of, key_heads_of

_SECTION = "tensor_parallel.partition_config"
# Keys of the section, and of one of its layer_specs -> the value where it is absent.
_KEYS: dict[str, Any] = {
    "use_default_specs": True,
    "strict_mode": False,
    "embedding_partition_dim": 1,
    "lm_head_patterns": ["lm_head", "embed_out"],
    "tp_size": 1,
    "layer_specs": [],
}
_SPEC_KEYS: dict[str, Any] = {
    "patterns": [],
    "partition_type": "column",
    "shape": None,
    "partition_dim": None,
    "model_types": None,
    "gather_output": False,
    "grad_allreduce": False,
}


@dataclasses.dataclass
class Rules:
    rules: list[_core.PartitionRule]
    source: str  # "partition_config", "preset llama", "tp_plan", "heuristics"
    strict: bool = False
    embedding_dim: int = 1
    head_names: Sequence[str] = ("lm_head", "embed_out")


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
    """Of the attributes that are integers; 0 without any."""
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
    """Of a model without a configuration: those of the attention modules that say how many heads they have."""
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


def rules_for(model: nn.Module, config: _core.Config, size: int) -> Rules:
    """The first source that is there: the configuration's rules or preset, the model's own tp_plan, heuristics."""
    preset = config.tensor_parallel.preset_model
    section = config.tensor_parallel.partition_config
    if section is not None:
        return _configured(section, preset, model, size)
    if preset:
        return Rules(_preset(preset, model), f"preset {preset}")
    plan = tp_plan_of(model)
    if plan and model_type(model) not in _PLANS_LEFT:
        return Rules([rule for name, style in plan.items() for rule in _planned(name, style, model)], "tp_plan")
    return Rules([], "heuristics")


def _preset(name: str, model: nn.Module) -> list[_core.PartitionRule]:
    return _core.preset_rules(name, facts_of(model), lambda pattern: matcher(pattern, f"preset {name}"))


def _configured(section: Any, preset: str | None, model: nn.Module, size: int) -> Rules:
    _check_keys(section, _KEYS, _SECTION)
    values = {**_KEYS, **section}
    for name in ("use_default_specs", "strict_mode"):
        _check_type(values[name], bool, f"{_SECTION}.{name}")
    _check_type(values["layer_specs"], (list, tuple), f"{_SECTION}.layer_specs")
    if values["tp_size"] not in (1, size):
        raise ConfigError(
            f"[config] {_SECTION}.tp_size is {values['tp_size']}; it must be 1 or tensor_parallel.autotp_size ({size})"
        )
    if values["embedding_partition_dim"] not in (0, 1):
        raise ConfigError(
            f"[config] {_SECTION}.embedding_partition_dim must be 0 or 1, got {values['embedding_partition_dim']!r}"
        )
    rules = [
        rule
        for number, spec in enumerate(values["layer_specs"])
        for rule in _spec(spec, f"{_SECTION}.layer_specs[{number}]")
    ]
    if values["use_default_specs"] and preset:
        rules += _preset(preset, model)
    if not rules:
        raise ConfigError(
            f"[config] {_SECTION}: there is no rule; give layer_specs, or preset_model with use_default_specs true"
        )
    heads = _strings(values["lm_head_patterns"], f"{_SECTION}.lm_head_patterns")
    return Rules(rules, "partition_config", values["strict_mode"], values["embedding_partition_dim"], heads)


def _spec(spec: Any, where: str) -> list[_core.PartitionRule]:
    _check_keys(spec, _SPEC_KEYS, where)
    values = {**_SPEC_KEYS, **spec}
    kinds = {"column": _core.Partition.Column, "row": _core.Partition.Row, "skip": _core.Partition.Skip}
    kind = values["partition_type"]
    if not isinstance(kind, str) or kind.lower() not in kinds:
        raise ConfigError(f"[config] {where}.partition_type must be one of {', '.join(kinds)}, got {kind!r}")
    partition = kinds[kind.lower()]
    shape = _shape(values["shape"], values["partition_dim"], partition, where)
    for name in ("gather_output", "grad_allreduce"):
        _check_type(values[name], bool, f"{where}.{name}")
    if values["gather_output"] and shape is not None:
        raise NotImplementedError(f"[config] {where}: gather_output with shape is not served")
    if values["gather_output"] and partition != _core.Partition.Column:
        raise ConfigError(f"[config] {where}.gather_output is for partition_type column, not {kind}")
    patterns = _strings(values["patterns"], f"{where}.patterns")
    if not patterns:
        raise ConfigError(f"[config] {where}.patterns is empty")
    types = values["model_types"]
    rules = []
    for pattern in patterns:
        rule = _rule(matcher(pattern, f"{where}.patterns"), pattern, where, partition)
        rule.shape = shape
        rule.model_types = [] if types is None else [t.lower() for t in _strings(types, f"{where}.model_types")]
        rule.gather_output = values["gather_output"]
        rule.sum_gradient = values["grad_allreduce"] and partition == _core.Partition.Skip
        rules.append(rule)
    return rules


def _rule(matches: Callable[[str], bool], pattern: str, source: str, partition: _core.Partition) -> _core.PartitionRule:
    rule = _core.PartitionRule()
    rule.matches, rule.pattern, rule.source, rule.partition = matches, pattern, source, partition
    return rule


def _shape(shape: Any, dim: Any, partition: _core.Partition, where: str) -> _core.PackedShape | None:
    if shape is None:
        return None
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise ConfigError(f"[config] {where}.shape must be a list, got {shape!r}")
    if dim is None:
        dim = 1 if partition == _core.Partition.Row else 0
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise ConfigError(f"[config] {where}.partition_dim must be an integer, got {dim!r}")
    return _core.PackedShape(shape, dim, where)


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
# Of modules around those, and of input embeddings, which tensor_parallel decides about: there is nothing to do.
_AROUND = (
    *("local", "gather", "ep_router", "ep_dispatch_experts", "moe_tp_experts", "moe_identity_expert"),
    *("embedding_rowwise", "embedding_colwise"),
)
# Model types whose plan cuts through a fused query, key and value, of whose layout heuristics know.
_PLANS_LEFT = ("codegen",)
# Low-rank projections that a norm follows, which some plans cut all the same: they stay whole.
_NEVER_CUT = ("q_a_proj", "kv_a_proj_with_mqa")


def tp_plan_of(model: nn.Module) -> dict[str, str]:
    """Of the configuration's base model, the class and the instance; what an instance only repeats with the path of its
    base model before it counts once."""
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


# ---------------------------------------------------------------- small checks


def _check_keys(value: Any, known: Mapping[str, Any], where: str) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"[config] {where} must be an object, got {value!r:.100}")
    unknown = sorted(set(value) - set(known))
    if unknown:
        raise ConfigError(f"[config] {where}: unknown {', '.join(unknown)}; known are {', '.join(known)}")


def _check_type(value: Any, kind: Any, where: str) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"[config] {where} has the wrong type: {value!r:.100}")


def _strings(value: Any, where: str) -> list[str]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"[config] {where} must be a list of texts, got {value!r:.100}")
    return list(items)
