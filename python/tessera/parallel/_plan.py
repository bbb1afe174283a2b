"""Which modules of a model are cut, how, and why. Pure: nothing is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from tessera import _core
from tessera.errors import ConfigError
from tessera.parallel._attention import check_heads
from tessera.parallel._classes import loss_of
from tessera.parallel._modules import EXPERTS, cut_of
from tessera.parallel._regions import find_regions
from tessera.parallel._rules import facts_of, rules_for

if TYPE_CHECKING:
    from tessera.parallel._attention import Attention, Follow

# Modules that use the weights of their children without calling them: these stay whole.
_OWN_USE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclasses.dataclass
class ParallelPlan:
    """How a model is cut over `size` ranks; str() is a table, and one line for each kind of block of what follows."""

    core: _core.ParallelPlan  # None in a pickled model
    size: int
    source: str  # of the rules
    skipped: list[str]  # names of parameters that a rule leaves whole
    summed: list[str]  # names whose gradient a rule sums
    loss: str | None = None  # the model's attribute that takes the loss of slices of the logits; None: logits are whole
    regions: _core.SequenceRegions | None = None  # where activations are cut along the sequence
    warnings: list[str] = dataclasses.field(default_factory=list)  # beside those of the core
    notes: dict[str, str] = dataclasses.field(default_factory=dict)  # by note: the first module it is true of

    def __deepcopy__(self, memo: Any) -> ParallelPlan:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "core": None}

    def __str__(self) -> str:
        table = "(of a pickled model)" if self.core is None else self.core.text().rstrip("\n")
        lines = [f"tensor parallel over {self.size} ranks, rules: {self.source}", table]
        lines += [] if self.regions is None else [self.regions.text()]
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines += [f"{path}: {note}" for note, path in self.notes.items()]
        return "\n".join(lines)

    def is_left_whole(self, name: str) -> bool:
        """A rule of the user's says so."""
        return name in self.skipped

    def add_notes(self, path: str, attention: Attention, found: Follow) -> None:
        """Notes what an attention that is cut by heads has on this rank."""
        heads = [end - begin for begin, end in attention.mine]
        self.note(path, f"{attention.heads} heads are {heads} by rank")
        for name in sorted({name for _, name, _ in found.attributes}):
            self.note(path, f"{name} has this rank's numbers of heads")
        for name, _ in (*found.embeddings, *found.params):
            self.note(path, f"{name}: cut by heads")
        if found.slices_bias:
            self.note(path, "biases that come in for all heads are sliced")

    def note(self, path: str, text: str) -> None:
        """Adds a line to what the plan prints, once, with the first module that it is about."""
        self.notes.setdefault(text, path)


def make_plan(model: nn.Module, config: _core.Config, size: int) -> ParallelPlan:
    """ConfigError, naming modules, numbers and keys, for what cannot be cut."""
    rules = rules_for(model, config, size)
    options = _core.plan_options(config, size, rules)
    options.expert_grain = _expert_grain(model, config)
    modules = list(_described(model))
    core = _core.make_plan(modules, facts_of(model), options)
    unknown = check_heads(model, core.decisions)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    kept, summed = _core.left_whole(options.rules, names)
    regions = find_regions(model, modules, core) if size > 1 and config.tessera.sequence_parallel_norms else None
    plan = ParallelPlan(core, size, rules.source, kept, summed, regions=regions)
    if size > 1:
        plan.warnings = unknown
    if size > 1 and options.vocab_parallel:
        _choose_loss(model, plan)
    return plan


def _choose_loss(model: nn.Module, plan: ParallelPlan) -> None:
    """Whether the model's loss can take slices of the logits."""
    cut = [decision.path for decision in plan.core.decisions if decision.vocabulary]
    head = next((path for path in cut if not isinstance(model.get_submodule(path), nn.Embedding)), None)
    if head is None:
        return
    known, plan.loss = loss_of(model)
    kind = type(model).__name__
    if plan.loss is not None:
        plan.note(head, f"{plan.loss} of {kind} takes the loss of slices of the logits")
    elif known:
        plan.note(head, f"logits are gathered, {kind} takes its loss of whole ones")
    else:
        plan.warnings.append(
            f"{head}: vocab_parallel_lm_head gathers the logits, because it is not known how {kind} takes its loss; "
            f"tessera.parallel.register_class({kind}, loss=...) says so"
        )


def _expert_grain(model: nn.Module, config: _core.Config) -> int:
    """torch's grouped product, which Transformers 5 takes for experts, wants rows of whole 16 bytes."""
    experts = [module for module in model.modules() if _kind(module) == _core.ModuleKind.Experts]
    configs = [getattr(module, "config", None) for module in experts]
    if not any(getattr(of, "_experts_implementation", None) == "grouped_mm" for of in configs):
        return 1
    sizes = [module._parameters[name].itemsize for module in experts for name in EXPERTS]  # type: ignore[union-attr]
    return max(1, 16 // min(_core.precision(config).param.itemsize, *sizes))


def _described(model: nn.Module) -> Iterator[_core.PlanModule]:
    names = set(_core.width_names())
    for path, module in model.named_modules():
        kind, weight = _kind(module), module._parameters.get("weight")
        if cut_of(module) is not None:  # cut by hand: it stays as it is
            kind, weight = _core.ModuleKind.Other, None
        if kind in (_core.ModuleKind.Linear, _core.ModuleKind.Conv1D, _core.ModuleKind.Other):
            if _used_by_parent(model, path):
                kind, weight = _core.ModuleKind.Other, None
            elif kind == _core.ModuleKind.Linear and weight is None:
                raise ConfigError(
                    f"[tensor_parallel] {path}: its weight is no parameter of its own (a parametrization?), so it "
                    "cannot be cut"
                )
        bias = module._parameters.get("bias")
        params = sum(p is not None for p in module._parameters.values())
        attributes = {n: v for n, v in vars(module).items() if n in names and type(v) is int}
        common = (path, type(module).__name__, kind)
        if kind == _core.ModuleKind.Experts:
            for param in EXPERTS:
                value = module._parameters[param]
                assert value is not None
                yield _core.PlanModule(
                    *common, list(value.shape), _bias_of(module, param), id(value), param, attributes, params
                )
        elif weight is None:
            yield _core.PlanModule(*common, attributes=attributes, params=params)
        else:
            elements = 0 if bias is None else bias.numel()
            yield _core.PlanModule(
                *common, list(weight.shape), elements, id(weight), attributes=attributes, params=params
            )


def _bias_of(module: nn.Module, param: str) -> int:
    bias = module._parameters.get(f"{param}_bias")
    return 0 if bias is None else bias.numel()


def _kind(module: nn.Module) -> _core.ModuleKind:
    kinds = _core.ModuleKind
    if isinstance(module, nn.Linear):
        return kinds.Linear
    if isinstance(module, nn.Embedding):
        return kinds.Embedding
    if isinstance(module, nn.ModuleList):
        return kinds.List
    if all((p := module._parameters.get(name)) is not None and p.dim() == 3 for name in EXPERTS):
        return kinds.Experts
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
