"""Modules whose weights are cut over a tensor-parallel group. A module becomes one by a change of its class, so that
its identity, names, hooks and ties stay; what is particular to it is in one ModuleCut."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tessera import _core
from tessera.errors import UsageError
from tessera.parallel._cuts import ParamCut, Range
from tessera.parallel._draws import Draws

CUT = "_tessera_cut"  # on modules: ModuleCut
UP, DOWN = EXPERTS = ("gate_up_proj", "down_proj")  # parameters of experts in one tensor each
SEQUENCE_DIM = 1  # dim of activations between blocks, [batch, sequence, hidden]


class Ranks:
    """The tensor-parallel group of one model, which its modules share. Copies of the model have the same; in a pickle
    there is none, nor in a model whose engine is gone: the next engine brings its own."""

    def __init__(self, group: _core.Group | None, rank: int, size: int, overlap: bool, draws: Draws) -> None:
        self._group = group
        self.rank = rank
        self.size = size
        self.overlap = overlap
        self.draws = draws
        self.keeps_whole = False  # sequence regions: the last forward without gradients could not cut its sequence

    @property
    def cut_sequence(self) -> bool:
        """Whether sequences are cut in the forward that runs, for a model with regions."""
        return torch.is_grad_enabled() or not self.keeps_whole

    @property
    def group(self) -> _core.Group:
        if self._group is None:
            raise UsageError(
                f"[tensor_parallel] the model is cut for {self.size} ranks and has no group of them; pass it to "
                "tessera.initialize (or tessera.parallel.shard_model) first"
            )
        return self._group

    @property
    def is_free(self) -> bool:
        """Out of a pickle, or of an engine that is gone."""
        return self._group is None

    def bind(self, group: _core.Group | None) -> None:
        self._group = group

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_group": None}


class Siblings:
    """Column-parallel layers of one parent: those that get one input share its way into the region, and the all-reduce
    of its gradient."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._entrance: Any = None

    @property
    def entrance(self) -> Any:
        if self._entrance is None:
            self._entrance = _core.Entrance(self._number)
        return self._entrance

    def __deepcopy__(self, memo: Any) -> Siblings:
        return memo.setdefault(id(self), Siblings(self._number))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_entrance": None}


@dataclasses.dataclass
class ModuleCut:
    """How one module is cut."""

    path: str
    kind: str  # "column", "row", "embedding", "vocabulary", "experts", "shared tail"
    ranks: Ranks
    params: dict[str, ParamCut]  # by name in the module; parameters without an entry are whole
    rule: str = ""  # the rule that took it
    gather: bool = False  # the whole output on every rank
    transposed: bool = False  # the weight is [in, out]
    own_use: Range = (0, 0)  # "shared tail": outputs that every rank uses for heads of its own
    # [rank]: of a column layer's last outputs, which every rank needs whole: it gathers them.
    tail: tuple[int, ...] = ()
    vocabulary: bool = False  # the dim that is cut is the vocabulary
    siblings: Siblings | None = None
    sequence: bool = False  # activations outside are cut along the sequence: Note [Sequence regions]
    watch: Any = None  # Watch, until this module showed what it had to: Note [Whole parameters in regions]
    mixed: bool = False  # inside a module that enters and leaves its region itself: Note [Mixed regions]
    _regions: dict[bool, Any] = dataclasses.field(default_factory=dict)  # whether the sequence is cut -> the region
    _region_group: Any = None

    @property
    def cuts_sequence(self) -> bool:
        """Whether the running forward cuts the sequence."""
        return self.sequence and self.ranks.cut_sequence

    @property
    def is_partial(self) -> bool:
        """Whether an output of the running forward is one term of a sum over the ranks, which is taken later on."""
        return self.mixed and self.ranks.cut_sequence

    @property
    def region(self) -> Any:
        group, sequence = self.ranks.group, self.cuts_sequence
        if self._region_group is not group:
            self._regions, self._region_group = {}, group
        if sequence not in self._regions:
            shares = self.siblings is not None and sequence == self.sequence
            self._regions[sequence] = _core.Region(
                group,
                sequence_dim=SEQUENCE_DIM if sequence else -1,
                overlap=self.ranks.overlap,
                label=self.path,
                entrance=self.siblings.entrance if self.siblings is not None and shares else None,
            )
        return self._regions[sequence]

    @property
    def label(self) -> str:
        return f"tensor-parallel module '{self.path}'"

    def sizes(self) -> list[int]:
        """Sizes of the weight's dim, by rank."""
        cut = self.params["weight"]
        return [cut.length(rank) for rank in range(self.ranks.size)]

    def own_weight(self) -> ParamCut:
        """The cut of a column layer's weight as if there were no tail, which follows all ranks' own outputs."""
        of = self.params["weight"]
        if not self.tail:
            return of
        ends = list(itertools.accumulate(of.length(rank) - tail for rank, tail in enumerate(self.tail)))
        ranges = tuple((own,) for own in zip([0, *ends], ends, strict=False))
        return ParamCut((*of.sizes[: of.dim], ends[-1], *of.sizes[of.dim + 1 :]), of.dim, ranges)

    def begin(self) -> int:
        """The begin of this rank's slice of the weight's dim."""
        return self.params["weight"].ranges[self.ranks.rank][0][0]

    def __deepcopy__(self, memo: Any) -> ModuleCut:
        siblings = copy.deepcopy(self.siblings, memo)
        return dataclasses.replace(
            self, params=dict(self.params), siblings=siblings, watch=None, _regions={}, _region_group=None
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "watch": None, "_regions": {}, "_region_group": None}


class _CutModule(nn.Module):
    weight: Any
    bias: Any
    _tessera_cut: ModuleCut

    def _matrix(self) -> torch.Tensor:
        """The weight as [out, in]."""
        weight: torch.Tensor = self.weight
        return weight.t() if self._tessera_cut.transposed else weight

    def extra_repr(self) -> str:
        cut = self._tessera_cut
        whole = cut.params["weight"].sizes if "weight" in cut.params else tuple(self.weight.shape)
        return f"{super().extra_repr()}, {cut.kind} of {tuple(whole)}, rank {cut.ranks.rank} of {cut.ranks.size}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Classes that were made for a model are not found by name."""
        cls = type(self)
        if cls in _STATIC:
            return super().__reduce_ex__(protocol)
        rest = super().__reduce_ex__(protocol)[2:]
        return _make_again, cls.__bases__, *rest


class _Column(_CutModule):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        cut = self._tessera_cut
        if cut.watch is not None:
            cut.watch.ran(cut)
        if cut.is_partial:
            own = F.linear(input, self._matrix(), self._parameters.get("bias"))
            return _core.gather_for_use(own, cut.ranks.group, -1, cut.sizes(), cut.label) if cut.gather else own
        out: torch.Tensor = _core.column_linear(input, self._matrix(), self._parameters.get("bias"), cut.region)
        out = _core.join_outputs(out, cut.ranks.group, cut.gather, cut.sizes(), cut.tail, cut.label)
        if cut.gather:
            return out
        if cut.ranks.draws.on and self.training and not cut.vocabulary and not cut.sequence:
            cut.ranks.draws.enter(cut.ranks.rank, input.device)
        return out


class _Row(_CutModule):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        cut = self._tessera_cut
        if cut.watch is not None:
            cut.watch.ran(cut, None if cut.is_partial or self._is_whole(input) else input)
        if cut.is_partial:
            return F.linear(input, self._matrix())
        if cut.ranks.draws.on and not cut.sequence:
            cut.ranks.draws.leave(input.device)
        weight = cut.params["weight"]
        total, mine = weight.sizes[weight.dim], weight.ranges[cut.ranks.rank]
        input = _core.own_inputs(input, cut.ranks.group, total, mine, cut.label)
        out: torch.Tensor = _core.row_linear(input, self._matrix(), self._parameters.get("bias"), cut.region)
        return out

    def _is_whole(self, input: torch.Tensor) -> bool:
        """Whether the input comes from a layer that is not cut."""
        cut = self._tessera_cut
        weight = cut.params["weight"]
        return input.size(-1) == weight.sizes[weight.dim] != weight.length(cut.ranks.rank)


class ColumnLinear(_Column, nn.Linear):
    """A linear layer with this rank's outputs; with `gather` all of them come out."""


class RowLinear(_Row, nn.Linear):
    """A linear layer with this rank's inputs, of which it takes its part where it gets all; returns the sum over the
    ranks."""


class _SharedTail(_CutModule):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        cut = self._tessera_cut
        out: torch.Tensor = super().forward(input)
        if cut.is_partial:
            return out
        return _core.share_outputs(out, cut.ranks.group, cut.own_use, cut.label)


class SharedTailLinear(_SharedTail, nn.Linear):
    """Whole; but some of its outputs go to every rank's heads without a column-parallel layer between."""


class _Experts(_CutModule):
    """Experts in one tensor, of each of which a rank has a slice: what comes in goes to all ranks, what comes out is
    the sum, to which the first rank adds the bias (its gradient is whole on every rank)."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cut = self._tessera_cut

        def enter(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_floating_point() and not cut.is_partial:
                return _core.copy_to_ranks(value, cut.ranks.group, cut.label)
            return value

        with self._bias_of_first_rank(cut.ranks.rank):
            out = super().forward(*map(enter, args), **{name: enter(value) for name, value in kwargs.items()})
        return out if cut.is_partial else _core.reduce_from_ranks(out, cut.ranks.group, cut.label)

    @contextlib.contextmanager
    def _bias_of_first_rank(self, rank: int) -> Iterator[None]:
        """Makes the bias zero on other ranks inside the `with`, where it still gets its gradient: an attribute of the
        object itself comes before nn.Module's look-up of parameters."""
        name = f"{DOWN}_bias"
        bias = self._parameters.get(name)
        if bias is None or rank == 0:
            yield
            return
        vars(self)[name] = bias - bias.detach()
        try:
            yield
        finally:
            del vars(self)[name]


class _Embedded(_CutModule):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        cut = self._tessera_cut
        if cut.watch is not None:
            cut.watch.ran(cut)
        out: torch.Tensor = super().forward(*args, **kwargs)
        return _core.gather_from_ranks(out, cut.ranks.group, -1, cut.sizes(), cut.label) if cut.gather else out


class CutEmbedding(_Embedded, nn.Embedding):
    """An embedding with a slice of every row; whole rows come out, or where `gather` is False this rank's slice of
    them."""


class _VocabEmbedded(_CutModule):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        cut = self._tessera_cut
        if cut.watch is not None:
            cut.watch.ran(cut)
        padding: int | None = self.padding_idx  # type: ignore[assignment]
        vocabulary = cut.params["weight"].sizes[0]
        out: torch.Tensor = _core.vocab_embedding(
            input, self.weight, cut.begin(), vocabulary, -1 if padding is None else padding, cut.region
        )
        return out


class VocabEmbedding(_VocabEmbedded, nn.Embedding):
    """A slice of the rows; the sum over the ranks."""


_STATIC: frozenset[type] = frozenset({ColumnLinear, RowLinear, SharedTailLinear, CutEmbedding, VocabEmbedding})


Classes = dict[tuple[type, type], type[nn.Module]]


def class_for(mixin: type[_CutModule], base: type[nn.Module], made: Classes) -> type[nn.Module]:
    """`base` with the forward of `mixin`. `made`: those that were made before."""
    for cls in (*_STATIC, *made.values()):
        if cls.__bases__ == (mixin, base):
            return cls
    return made.setdefault((mixin, base), _new_class(mixin, base))


def _new_class(mixin: type[_CutModule], base: type[nn.Module]) -> type[nn.Module]:
    return type(f"{mixin.__name__.lstrip('_')}{base.__name__}", (mixin, base), {"__module__": base.__module__})


def _make_again(mixin: type[_CutModule], base: type[nn.Module]) -> nn.Module:
    cls = class_for(mixin, base, {})
    return cls.__new__(cls)


def takes_linear_forward(module: nn.Module) -> bool:
    """A weight and perhaps a bias, used as nn.Linear does."""
    return type(module).forward is nn.Linear.forward or type(module).__name__ == "Conv1D"


def cut_of(module: nn.Module) -> ModuleCut | None:
    return vars(module).get(CUT)


# Attributes that say how many inputs and outputs a module has -> which dim of the weight.
_WIDTHS = {
    nn.Linear: {"out_features": 0, "in_features": 1},
    nn.Embedding: {"num_embeddings": 0, "embedding_dim": 1},
}


def widths_of(module: nn.Module) -> dict[str, int]:
    for cls, widths in _WIDTHS.items():
        if isinstance(module, cls):
            return widths
    return {"nf": 1, "nx": 0} if type(module).__name__ == "Conv1D" else {}
