"""Carries a plan out: cuts the modules of a model over a tensor-parallel group."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tessera import _core
from tessera.errors import ConfigError
from tessera.parallel import _modules
from tessera.parallel._attention import SliceBias, attention_of, follow
from tessera.parallel._cuts import ParamCut
from tessera.parallel._draws import Draws, has_draws
from tessera.parallel._modules import (
    CUT,
    Classes,
    ModuleCut,
    Ranks,
    Siblings,
    class_for,
    cut_of,
    takes_linear_forward,
    widths_of,
)
from tessera.parallel._plan import ParallelPlan
from tessera.parallel._regions import (
    EnterMixed,
    EnterRegion,
    JoinSequence,
    LeaveMixed,
    SplitSequence,
    refuse_router_loss,
)

_PLAN = "_tessera_parallel"  # on a model that is cut: ParallelPlan
_SUMMED = "_tessera_summed"  # on parameters whose gradient is summed over the group
_EXTRA = "_tessera_extra_cuts"  # on modules that are not cut: name -> ParamCut of their own parameters

# Makes a parameter whole that is partitioned, for good; and partitions it again once it is cut.
Whole = Callable[[nn.Parameter], None]
Hold = Callable[[nn.Module, str, nn.Parameter], None]


def plan_of(model: nn.Module) -> ParallelPlan | None:
    """The plan that `model` is cut by; None for a whole one."""
    return vars(model).get(_PLAN)


def cuts_of(model: nn.Module) -> dict[int, ParamCut]:
    """The cuts of parameters that are cut, by id."""
    found: dict[int, ParamCut] = {}
    for module in model.modules():
        cut = cut_of(module)
        cuts = {**(cut.params if cut is not None else {}), **vars(module).get(_EXTRA, {})}
        for name, of in cuts.items():
            param = module._parameters.get(name)
            if param is not None:
                found[id(param)] = of
    return found


def is_uneven(model: nn.Module) -> bool:
    """Ranks have slices of several sizes of one parameter."""
    return any(len({of.length(rank) for rank in range(len(of.ranges))}) > 1 for of in cuts_of(model).values())


class Cutter:
    """Cuts `model` as `plan` says; undo() makes it whole again, with the first rank's values."""

    def __init__(
        self,
        model: nn.Module,
        plan: ParallelPlan,
        group: _core.Group,
        whole: Whole = lambda param: None,
        hold: Hold = lambda module, name, param: None,
        overlap: bool = True,
    ) -> None:
        self._model = model
        self._plan = plan
        self._group = group
        self._whole = whole
        self._hold = hold
        self.ranks = Ranks(group, group.rank, group.size, overlap, Draws(has_draws(model)))
        self._done: dict[int, ParamCut] = {}  # by id of the parameter
        self._undo: list[Callable[[], None]] = []
        self._classes: Classes = {}

    def run(self) -> None:
        try:
            self._run()
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        while self._undo:
            with contextlib.suppress(RuntimeError):  # another rank may be gone
                self._undo.pop()()

    def _run(self) -> None:
        columns: dict[str, dict[str, ParamCut]] = {}  # by path of the parent
        decided: dict[str, set[str]] = {}
        for decision in self._plan.core.decisions:
            parent, _, name = decision.path.rpartition(".")
            decided.setdefault(parent, set()).add(name)
            cut = self._carry_out(decision)
            if cut is not None and cut.kind == "column" and not cut.gather and not cut.vocabulary:
                columns.setdefault(parent, {})[name] = cut.own_weight()
        for parent, children in columns.items():
            if len(children) > 1:
                siblings = Siblings(len(children))
                for name in children:
                    vars(self._model.get_submodule(f"{parent}.{name}" if parent else name))[CUT].siblings = siblings
            self._attention(parent, children, decided[parent])
        if self._plan.regions is not None:
            self._cut_sequence(self._plan.regions, columns)
        for name in self._plan.summed:
            self._sum_one(name)
        for path, widths in self._plan.core.widths.items():
            for name, sizes in widths.items():
                self._put(self._model.get_submodule(path), name, sizes[self.ranks.rank])
        self._put(self._model, _PLAN, self._plan)
        self.ranks.draws.uneven = is_uneven(self._model)

    # ---------------------------------------------------------------- modules

    def _carry_out(self, decision: _core.Decision) -> ModuleCut | None:
        """Carries a decision out. None for a module that stays whole."""
        module = self._model.get_submodule(decision.path)
        if decision.sum_gradient:
            self._sum(decision.path, module)
        if decision.own_use is not None:
            tail = ModuleCut(decision.path, "shared tail", self.ranks, {}, decision.rule, own_use=decision.own_use)
            self._become(module, _modules._SharedTail, tail)
        if decision.partition == _core.Partition.Skip:
            return None
        param = module._parameters[decision.param]
        assert param is not None
        ranges = tuple(tuple(mine) for mine in decision.ranges)
        before = self._done.get(id(param))  # cut already, with a module that it is tied to
        of = ParamCut(tuple(param.shape) if before is None else before.sizes, decision.dim, ranges)
        if decision.param != "weight":
            return self._experts(module, decision, of)
        _core.check_matrix(decision.path, len(of.sizes), decision.rule)
        return self._layer(module, decision, of)

    def _experts(self, module: nn.Module, decision: _core.Decision, of: ParamCut) -> ModuleCut:
        cut = cut_of(module)
        if cut is None:
            cut = ModuleCut(decision.path, "experts", self.ranks, {}, decision.rule)
            self._become(module, _modules._Experts, cut)
        parts = {decision.param: of}
        bias = module._parameters.get(f"{_modules.UP}_bias")
        if decision.param == _modules.UP and bias is not None:
            parts[f"{_modules.UP}_bias"] = ParamCut(tuple(bias.shape), 1, of.ranges)
        for name, part in parts.items():
            cut.params[name] = part
            self._param(module, name, part, decision.path)
        return cut

    def _layer(self, module: nn.Module, decision: _core.Decision, weight: ParamCut) -> ModuleCut:
        cut = ModuleCut(decision.path, "", self.ranks, {"weight": weight}, decision.rule, decision.gather_output)
        cut.vocabulary, cut.tail = decision.vocabulary, tuple(decision.tail)
        mixin: type[_modules._CutModule]
        if isinstance(module, nn.Embedding):
            _check_embedding(module, decision)
            cut.kind = "vocabulary" if decision.dim == 0 else "embedding"
            mixin = _modules._VocabEmbedded if decision.dim == 0 else _modules._Embedded
        else:
            if not takes_linear_forward(module):
                self._probe(module, decision.path)
            cut.transposed = type(module).__name__ == "Conv1D"
            column = decision.partition == _core.Partition.Column
            cut.kind = "column" if column else "row"
            mixin = _modules._Column if column else _modules._Row
            bias = module._parameters.get("bias")
            if column and bias is not None:
                cut.params["bias"] = self._bias_cut(decision.path, bias, weight)
        if self._plan.loss is not None and cut.vocabulary and cut.kind == "column":
            cut.gather = False
            self._take_loss(cut, self._plan.loss)
        self._become(module, mixin, cut)
        return cut

    def _probe(self, module: nn.Module, path: str) -> None:
        """A class that is not known may be cut when it computes what nn.Linear would."""
        for param in module.parameters(recurse=False):
            self._whole(param)
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        if weight.is_meta:
            return  # on its rule's word
        sample = torch.linspace(-1, 1, 2 * weight.size(1), dtype=weight.dtype, device=weight.device).view(2, -1)
        with torch.no_grad():
            try:
                same = torch.allclose(type(module).forward(module, sample), F.linear(sample, weight, bias), 1e-2, 1e-3)
            except (RuntimeError, TypeError, ValueError):
                same = False
        if not same:
            raise ConfigError(
                f"[tensor_parallel] {path}: a {type(module).__name__} does not compute what nn.Linear would of its "
                "weight and bias, so it cannot be cut; give it a rule with partition_type skip in "
                "tensor_parallel.partition_config"
            )

    def _bias_cut(self, path: str, bias: nn.Parameter, weight: ParamCut) -> ParamCut:
        _core.check_bias(path, bias, weight.sizes[weight.dim])
        return ParamCut((bias.numel(),), 0, weight.ranges)

    def _become(self, module: nn.Module, mixin: type[_modules._CutModule], cut: ModuleCut) -> None:
        base, widths = type(module), widths_of(module)
        module.__class__ = class_for(mixin, base, self._classes)
        self._undo.append(lambda: setattr(module, "__class__", base))
        self._put(module, CUT, cut)
        for name, of in cut.params.items():
            self._param(module, name, of, cut.path)
        if "weight" in cut.params:
            for name, dim in widths.items():
                if dim == cut.params["weight"].dim:
                    self._put(module, name, cut.params["weight"].length(self.ranks.rank))

    def _param(self, module: nn.Module, name: str, of: ParamCut, path: str) -> None:
        param = module._parameters[name]
        assert param is not None
        label = f"'{path}.{name}'"
        if id(param) in self._done:
            if self._done[id(param)] != of:
                raise ConfigError(f"[tensor_parallel] {label} is shared by modules that are cut in different ways")
            return
        self._whole(param)
        with torch.no_grad():
            if not param.is_meta:
                value = param.detach().contiguous()
                self._group.broadcast(value, 0, f"value of {label} before it is cut")
                param.data = of.take(value, self.ranks.rank)
            else:
                param.data = param.data.new_empty(of.shape(self.ranks.rank))
        param.grad = None
        self._done[id(param)] = of
        self._mark(param, "tensor_model_parallel", True)
        self._undo.append(functools.partial(self._join, param, of, label))
        self._hold(module, name, param)

    def _join(self, param: nn.Parameter, of: ParamCut, label: str) -> None:
        param.grad = None
        if param.is_meta:
            param.data = param.data.new_empty(of.sizes)
        else:
            param.data = of.gather(param.data, self._group, f"value of {label} as it was")

    # ---------------------------------------------------------------- what follows

    def _attention(self, path: str, columns: dict[str, ParamCut], decided: set[str]) -> None:
        module = self._model.get_submodule(path)
        attention = attention_of(path, module, columns)
        if attention is None:
            return
        rank = self.ranks.rank
        found = follow(attention, rank, decided, self._plan.is_left_whole)
        for owner, name, value in found.attributes:
            self._put(owner, name, value)
        for name, of in found.embeddings:
            child_cut = ModuleCut(f"{path}.{name}", "embedding", self.ranks, {"weight": of}, "heads")
            self._become(module.get_submodule(name), _modules._Embedded, child_cut)
        if found.params:
            self._put(module, _EXTRA, dict(found.params))
            for name, of in found.params:
                self._param(module, name, of, path)
        if found.slices_bias:
            handle = module.register_forward_pre_hook(SliceBias(attention, rank), with_kwargs=True)
            self._undo.append(handle.remove)
        self._plan.add_notes(path, attention, found)

    def _cut_sequence(self, regions: _core.SequenceRegions, columns: dict[str, dict[str, ParamCut]]) -> None:
        for path in regions.inner:
            module = self._model.get_submodule(path)
            layers = {name: cut for name, child in module.named_children() if (cut := cut_of(child)) is not None}
            for cut in layers.values():
                cut.sequence = cut.kind in ("column", "row")
            first = layers[next(iter(columns[path]))]
            if first.siblings is None:
                first.siblings = Siblings(1)
            hook: Any = EnterRegion(module, first)
            self._undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        self._cut_mixed(regions)
        first_block, last = (self._model.get_submodule(path) for path in (regions.first, regions.last))
        hook = SplitSequence(first_block, self.ranks, regions.first)
        self._undo.append(first_block.register_forward_pre_hook(hook, with_kwargs=True).remove)
        self._undo.append(last.register_forward_hook(JoinSequence(self.ranks, regions.last)).remove)
        for path in regions.summed():
            self._sum(path, self._model.get_submodule(path))

    def _cut_mixed(self, regions: _core.SequenceRegions) -> None:
        for path in regions.mixed:
            module = self._model.get_submodule(path)
            for child in module.modules():
                cut = cut_of(child)
                if cut is not None:
                    ends = cut.kind == "row" and path not in regions.sums
                    cut.sequence, cut.mixed = ends, not ends
            enter: Any = EnterMixed(module, self.ranks, path)
            self._undo.append(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            if path in regions.sums:
                self._undo.append(module.register_forward_hook(LeaveMixed(self.ranks, path)).remove)
        if regions.sums:
            hook: Any = refuse_router_loss
            self._undo.append(self._model.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _sum(self, path: str, module: nn.Module) -> None:
        for name, _ in module.named_parameters(recurse=False):
            self._sum_one(f"{path}.{name}")

    def _sum_one(self, name: str) -> None:
        param = self._model.get_parameter(name)
        handle = sum_gradient(param, name, self.ranks)
        if handle is not None:
            self._undo.append(handle.remove)
            self._undo.append(functools.partial(vars(param).pop, _SUMMED, None))

    def _take_loss(self, head: ModuleCut, attribute: str) -> None:
        """The model takes its loss over slices of the logits from now on."""
        weight = head.params["weight"]
        loss = VocabularyLoss(self.ranks, head.begin(), weight.sizes[weight.dim])
        self._put(self._model, attribute, loss)
        self._undo.append(self._model.register_forward_hook(loss.check).remove)

    # ---------------------------------------------------------------- undoing

    def _put(self, owner: Any, name: str, value: Any) -> None:
        attributes = vars(owner)
        missing = object()
        before = attributes.get(name, missing)
        attributes[name] = value

        def restore() -> None:
            if before is missing:
                attributes.pop(name, None)
            else:
                attributes[name] = before

        self._undo.append(restore)

    def _mark(self, param: nn.Parameter, name: str, value: Any) -> None:
        setattr(param, name, value)
        self._undo.append(lambda: vars(param).pop(name, None))


def sum_gradient(param: torch.Tensor, name: str, ranks: Ranks) -> Any:
    """Sums a whole parameter's gradient over the ranks. The hook; None where it is summed already, or has none."""
    if not param.requires_grad or is_summed(param) or getattr(param, "tensor_model_parallel", False):
        return None
    setattr(param, _SUMMED, True)
    return param.register_hook(_Sum(ranks, f"gradient of '{name}'"))


def is_summed(param: torch.Tensor) -> bool:
    return hasattr(param, _SUMMED)


class _Sum:
    """A hook of a parameter: its gradient is the sum over the group."""

    def __init__(self, ranks: Ranks, label: str) -> None:
        self._ranks = ranks
        self._label = label

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _core.reduce_from_ranks(grad, self._ranks.group, self._label)
        return out


class VocabularyLoss:
    """The loss of a causal language model of Transformers, over logits of which this rank has a slice."""

    def __init__(self, ranks: Ranks, begin: int, vocabulary: int) -> None:
        self._ranks = ranks
        self._begin = begin
        self._vocabulary = vocabulary
        self._asked = False  # in the forward that runs

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        self._asked = True
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.to(logits.device).contiguous()
        losses: torch.Tensor = _core.vocab_cross_entropy(
            logits, target, self._begin, self._vocabulary, self._ranks.group, ignore_index
        )
        count = (target != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return losses.sum() / count

    def check(self, model: nn.Module, _args: Any, output: Any) -> None:
        """A forward hook of the model: a loss that was not asked for here is one of a slice of the logits."""
        asked, self._asked = self._asked, False
        if getattr(output, "loss", None) is not None and not asked:
            kind = type(model).__name__
            raise ConfigError(
                f"[tensor_parallel] {kind} took its loss from logits of which this rank has a slice, and not by the "
                f"attribute that it is known to call; say so with tessera.parallel.register_class({kind}, loss=None), "
                "or leave vocab_parallel_lm_head out"
            )


def _check_embedding(module: nn.Embedding, decision: _core.Decision) -> None:
    if decision.dim == 0 and type(module).forward is not nn.Embedding.forward:
        raise ConfigError(
            f"[tensor_parallel] {decision.path}: a {type(module).__name__} does more than look up rows, so it cannot "
            "be cut over the vocabulary"
        )
    _core.check_embedding(
        decision.path, module.max_norm is not None, module.scale_grad_by_freq, module.sparse, decision.rule
    )


def ranks_of(model: nn.Module) -> Ranks:
    """The ranks of a model that is cut."""
    found = next((cut.ranks for module in model.modules() if (cut := cut_of(module)) is not None), None)
    if found is None:
        raise ConfigError("[tensor_parallel] the model is not cut; call tessera.parallel.shard_model() first")
    return found


def bind(model: nn.Module, group: _core.Group) -> Ranks:
    """A model that is cut gets `group` for its collectives."""
    ranks = ranks_of(model)
    _core.check_same_ranks(ranks.rank, ranks.size, group)
    ranks.bind(group)
    ranks.draws = Draws(has_draws(model))
    ranks.draws.uneven = is_uneven(model)
    for module in model.modules():  # copies of parameters come without marks and hooks
        cut = cut_of(module)
        for name in cut.params if cut is not None else ():
            vars(module._parameters[name])["tensor_model_parallel"] = True
    plan = plan_of(model)
    summed = [decision.path for decision in plan_decisions(model) if decision.sum_gradient]
    summed += plan.regions.summed() if plan is not None and plan.regions is not None else ()
    names = [
        f"{path}.{name}" for path in summed for name, _ in model.get_submodule(path).named_parameters(recurse=False)
    ]
    for name in (*names, *(plan.summed if plan is not None else ())):
        sum_gradient(model.get_parameter(name), name, ranks)
    return ranks


def plan_decisions(model: nn.Module) -> list[_core.Decision]:
    """The decisions by which `model` was cut; a model that was pickled has none."""
    plan = plan_of(model)
    return [] if plan is None or plan.core is None else plan.core.decisions
