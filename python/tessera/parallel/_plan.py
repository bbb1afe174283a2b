"""Which modules of a model are cut, how, and why. Pure: nothing is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from tessera import _core
from tessera.errors import ConfigError
from tessera.parallel._rules import Rules, facts_of, rules_for

if TYPE_CHECKING:
    from tessera.parallel._attention import Attention, Follow

# Modules that use the weights of their children without calling them: these stay whole.
_OWN_USE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
# Parts of a model that have a configuration of their own, which rules for its text do not describe.
_OTHER_TOWERS = ("vision_config", "audio_config", "image_config", "vq_config")


@dataclasses.dataclass
class ParallelPlan:
    """How a model is cut over `size` ranks; str() is a table, and one line for each kind of block of what follows."""

    core: _core.Plan
    size: int
    source: str  # of the rules
    skipped: list[str]  # patterns of paths that a rule leaves whole
    notes: dict[str, str] = dataclasses.field(default_factory=dict)  # by what is noted: the first module it is true of

    def __str__(self) -> str:
        lines = [f"tensor parallel over {self.size} ranks, rules: {self.source}", self.core.text().rstrip("\n")]
        lines += [f"{path}: {note}" for note, path in self.notes.items()]
        return "\n".join(lines)

    def is_left_whole(self, name: str) -> bool:
        """A rule of the user's says so."""
        return name in self.skipped

    def add_notes(self, path: str, attention: Attention, found: Follow) -> None:
        heads = [end - begin for begin, end in attention.mine]
        self._note(path, f"{attention.heads} heads are {heads} by rank")
        for name, _ in found.summed:
            self._note(path, f"{name}: gradient summed over the ranks")
        for name, _ in (*found.embeddings, *found.params):
            self._note(path, f"{name}: cut by heads")
        for name, tail in found.tails:
            self._note(path, f"{name}: outputs from {tail} on go to the heads of every rank")
        if found.slices_bias:
            self._note(path, "biases that come in for all heads are sliced")

    def _note(self, path: str, text: str) -> None:
        self.notes.setdefault(text, path)


def make_plan(model: nn.Module, config: _core.Config, size: int) -> ParallelPlan:
    """ConfigError, naming modules, numbers and keys, for what cannot be cut."""
    rules = rules_for(model, config, size)
    options = _core.PlanOptions()
    options.size = size
    options.rules = rules.rules
    options.strict = rules.strict
    options.grain = config.get("tensor_parallel.tp.tp_grain_size")
    options.embedding_dim = rules.embedding_dim
    options.head_names = list(rules.head_names)
    options.vocab_parallel = config.get("tensor_parallel.vocab_parallel_lm_head")
    modules = list(_modules(model, rules))
    core = _core.make_plan(modules, facts_of(model), options)
    skipped = [
        f"{path}.weight"
        for path, module in model.named_modules()
        if module._parameters.get("weight") is not None and _skipped(f"{path}.weight", rules)
    ]
    return ParallelPlan(core, size, rules.source, skipped)


def _skipped(name: str, rules: Rules) -> bool:
    first = next((rule for rule in rules.rules if rule.matches(name)), None)
    return first is not None and first.partition == _core.Partition.Skip


def _modules(model: nn.Module, rules: Rules) -> Iterator[_core.PlanModule]:
    left = [] if rules.rules else _towers(model)
    for path, module in model.named_modules():
        if any(path == tower or path.startswith(f"{tower}.") for tower in left):
            continue
        weight = module._parameters.get("weight")
        kind = _kind(module)
        if kind != _core.ModuleKind.Embedding and kind != _core.ModuleKind.List and _used_by_parent(model, path):
            kind, weight = _core.ModuleKind.Other, None
        if kind == _core.ModuleKind.Linear and weight is None:
            raise ConfigError(
                f"[tensor_parallel] {path}: its weight is no parameter of its own (a parametrization?), so it cannot "
                "be cut"
            )
        sizes = list(weight.shape) if weight is not None and weight.dim() == 2 else []
        bias = module._parameters.get("bias") is not None
        yield _core.PlanModule(path, type(module).__name__, kind, sizes, bias, id(weight) if weight is not None else 0)


def _kind(module: nn.Module) -> _core.ModuleKind:
    kinds = _core.ModuleKind
    if isinstance(module, nn.Linear):
        return kinds.Linear
    if isinstance(module, nn.Embedding):
        return kinds.Embedding
    if isinstance(module, nn.ModuleList):
        return kinds.List
    name = type(module).__name__
    if name == "Conv1D":
        return kinds.Conv1D
    return kinds.Norm if "norm" in name.lower() else kinds.Other


def _used_by_parent(model: nn.Module, path: str) -> bool:
    while path:
        path = path.rpartition(".")[0]
        if isinstance(model.get_submodule(path), _OWN_USE):
            return True
    return False


def _towers(model: nn.Module) -> list[str]:
    config: Any = getattr(model, "config", None)
    others = [getattr(config, name) for name in _OTHER_TOWERS if getattr(config, name, None) is not None]
    return [
        path
        for path, module in model.named_modules()
        if path and any(getattr(module, "config", None) is other for other in others)
    ]
