"""DsParameter: partitioned parameters as old callers expect them, with `ds_*` attributes and the shape (0,) meanwhile.

A parameter that an engine of stage 3 or zero.Init holds gets a class of its own for that time: DsParameter beside the
class it had. Its real shape stays what it is, and so does all that runs in C++; Python sees (0,) while nobody may read:
programs do, but not the modules of Tessera and of torch (which compares shapes when it recomputes).
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
from tessera.engine.front import core_group
from tessera.zero.engines import Mark, engine_of, holder_of
from torch import nn

from deepspeed import _pieces
from tessera import _core
from tessera.zero import ParamStatus, partition_info

_ids = itertools.count()
_STATE = "_ds_state"


class _State(Mark):
    """What a parameter keeps from one question to the next."""

    def __init__(self) -> None:
        self.id = next(_ids)
        self.sub_modules: set[int] = set()
        self.lent: _pieces.Lent | None = None
        self.view: _pieces.View | None = None


class DsParameter(nn.Parameter):
    """The attributes that DeepSpeed's partitioned parameters have."""

    @property
    def ds_id(self) -> int:
        return _state(self).id

    @property
    def ds_active_sub_modules(self) -> set[int]:
        return _state(self).sub_modules

    @property
    def ds_shape(self) -> torch.Size:
        return _whole_shape(self)

    @property
    def ds_numel(self) -> int:
        return _whole_shape(self).numel()

    @property
    def ds_status(self) -> ParamStatus:
        info = partition_info(self)
        return ParamStatus.AVAILABLE if info is None else info.status

    @property
    def ds_persist(self) -> bool:
        info = partition_info(self)
        return info is None or not info.partitioned

    @property
    def ds_process_group(self) -> Any:
        return torch.distributed.group.WORLD

    @property
    def is_external_param(self) -> bool:
        return False

    @property
    def ds_tensor(self) -> torch.Tensor:
        """This rank's even piece of the flat parameter, the last one padded with zeros: a copy, since Tessera cuts
        units, not parameters. What is written to it is the parameter's from the next forward, step(), save, region or
        reading of a piece on; UsageError there where every rank holds the parameter whole. Collective while the
        parameter is partitioned."""
        rank, ranks = _place(self)
        whole = self.ds_status is ParamStatus.AVAILABLE
        if whole and ranks == 1 and self.is_contiguous():
            return self._whole_piece()
        settle([self])
        if not whole:
            self.all_gather()
        try:
            size = self.partition_numel()
            piece = self.detach().as_subclass(torch.Tensor).reshape(-1)[rank * size : (rank + 1) * size].clone()
        finally:
            if not whole:
                self.partition()
        if piece.numel() < size:
            piece = torch.cat([piece, piece.new_zeros(size - piece.numel())])
        state, steps = _state(self), _pieces.steps_of(self)
        if state.lent is None:
            state.lent = _pieces.Lent(_named(piece), steps, shared=not whole)
            _note_lent(self)
        else:
            state.lent.read(piece, steps)
        return state.lent.piece

    def _whole_piece(self) -> torch.Tensor:
        """One rank has all of it: a view, which may be given other data."""
        settle([self])
        state = _state(self)
        if state.view is None:
            state.view = _pieces.View(_named(self.detach().as_subclass(torch.Tensor).view(-1)))
            _note_lent(self)
        return state.view.piece

    def partition_numel(self) -> int:
        """Elements of ds_tensor."""
        return -(-self.ds_numel // _place(self)[1])

    def all_gather(self, param_list: Iterable[nn.Parameter] | None = None, async_op: bool = False) -> None:
        """Whole until partition(). Collective."""
        params = list(param_list or [self])
        settle(params)
        for holder, numbers in _by_holder(params):
            holder.gather(numbers, _core.Writes.None_, 0)

    def all_gather_coalesced(self, params: Iterable[nn.Parameter], **_: Any) -> _Done:
        self.all_gather(params)
        return _Done()

    def partition(self, param_list: Iterable[nn.Parameter] | None = None, **_: Any) -> None:
        """Ends all_gather(). Collective."""
        for holder, numbers in _by_holder(param_list or [self]):
            holder.release(numbers, _core.Writes.None_, 0)

    def ds_summary(self, slice_shape: Any = None, use_debug_name: bool = False) -> dict[str, Any]:
        return {
            "id": self.ds_id,
            "status": self.ds_status.name,
            "numel": self.numel(),
            "ds_numel": self.ds_numel,
            "shape": tuple(self.shape),
            "ds_shape": tuple(self.ds_shape),
            "requires_grad": self.requires_grad,
            "persist": self.ds_persist,
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = super().__deepcopy__(memo)
        disown([made])  # the copy is in nobody's care
        return made

    # ---- the shape that callers see

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._shape_for(sys._getframe(1))

    def size(self, dim: int | None = None) -> Any:
        shape = self._shape_for(sys._getframe(1))
        return shape if dim is None else shape[dim]

    def numel(self) -> int:
        return self._shape_for(sys._getframe(1)).numel()

    nelement = numel

    def _shape_for(self, caller: types.FrameType) -> torch.Size:
        if caller.f_globals.get("__name__", "").startswith(_SEE_THE_WHOLE) or not self._is_away():
            return _whole_shape(self)
        return _EMPTY

    def _is_away(self) -> bool:
        info = partition_info(self)
        return info is not None and info.status is ParamStatus.NOT_AVAILABLE


class _Done:
    """The handle of a gather that is over."""

    def wait(self, **_: Any) -> None:
        """Nothing is left to wait for."""


def _named(piece: torch.Tensor) -> torch.Tensor:
    piece.ds_numel = piece.numel()  # type: ignore[attr-defined]
    return piece


def _note_lent(param: torch.Tensor) -> None:
    engine = engine_of(param)
    if engine is not None:
        vars(engine).setdefault(LENT, []).append(param)


def settle(params: Iterable[torch.Tensor]) -> None:
    """What was written to their ds_tensor holds. Collective."""
    _pieces.settle([param for param in params if isinstance(param, DsParameter)], _STATE)


def settle_engine(engine: Any) -> None:
    """The same of all that an engine has given out. Collective."""
    lent = vars(engine).get(LENT)
    if lent:
        settle(lent)
        vars(engine)[LENT] = [p for p in lent if _state(p).lent is not None or _state(p).view is not None]


LENT = "ds_lent_pieces"  # of an engine: parameters
_EMPTY = torch.Size([0])
_SEE_THE_WHOLE = ("tessera.", "torch.")  # beginnings of the names of modules
_classes: dict[type, type] = {}


def _state(param: torch.Tensor) -> _State:
    state = vars(param).get(_STATE)
    if state is None:  # None too: of a pickled or copied one
        state = vars(param)[_STATE] = _State()
    return state


def _whole_shape(param: torch.Tensor) -> torch.Size:
    return torch.Tensor.size(param)


def _place(param: torch.Tensor) -> tuple[int, int]:
    """This rank among those that share the parameter, and their number."""
    engine = engine_of(param)
    if engine is None:
        group = core_group()
        return group.rank, group.size
    axes = [_core.Axis.DpShard, _core.Axis.Sp]
    mesh = engine.core.mesh()
    return mesh.rank(axes), mesh.size(axes)


def _by_holder(params: Iterable[torch.Tensor]) -> list[tuple[Any, list[int]]]:
    found: dict[int, tuple[Any, list[int]]] = {}
    for param in params:
        held = holder_of(param)
        if held is not None:
            found.setdefault(id(held[0]), (held[0], []))[1].append(held[1])
    return list(found.values())


def adopt(params: Iterable[torch.Tensor]) -> None:
    """They have the attributes from now on."""
    for param in params:
        cls = type(param)
        if isinstance(param, nn.Parameter) and not issubclass(cls, DsParameter):
            if cls not in _classes:
                bases = (DsParameter,) if cls is nn.Parameter else (DsParameter, cls)
                _classes[cls] = type("Parameter", bases, {"_ds_was": cls, "__module__": cls.__module__})
            param.__class__ = _classes[cls]


def disown(params: Iterable[torch.Tensor]) -> None:
    """They are what they were before adopt()."""
    for param in params:
        was = getattr(type(param), "_ds_was", None)
        if was is not None:
            param.__class__ = was
            vars(param).pop(_STATE, None)
