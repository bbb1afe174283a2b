"""p.ds_tensor: the piece of a partitioned parameter that this rank holds in DeepSpeed, where Tessera cuts elsewhere.

A piece is a copy, in ordinary memory, of which any code may write any part. What differs from what was read becomes
the parameter's at the next call that all ranks make: a forward, step(), a save, a region, the next reading of a piece.
Pieces of a partitioned parameter are read by all ranks, so all know which are out, and exchange which were
written to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from tessera.engine.front import core_group
from tessera.errors import UsageError
from tessera.zero.engines import Region, engine_of, parts_of

from tessera import _core
from tessera.zero import ParamStatus, partition_info

_AXES = [_core.Axis.DpShard, _core.Axis.Sp]
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_users_of_storage = getattr(torch._C, "_storage_Use_Count", None)


class Lent:
    """A piece that is out, and what it was when it was read. `shared`: all ranks have read theirs."""

    def __init__(self, piece: torch.Tensor, steps: int, shared: bool) -> None:
        self.piece = piece
        self.shared = shared
        self.read(piece, steps)

    def read(self, values: torch.Tensor, steps: int) -> None:
        if values is not self.piece:
            self.piece.data.copy_(values)
        self.was = self.piece.detach().clone()
        self.steps = steps

    def written(self) -> torch.Tensor:
        """Marks the elements of the piece that were written since read()."""
        piece = self.piece.detach()
        _check_form(piece, self.was)
        return _words(piece.contiguous()) != _words(self.was)

    def is_held(self) -> bool:
        """Whether somebody else has the piece, or a view of it."""
        if sys.getrefcount(self.piece) > 2:  # ours, and the call's
            return True
        storage = self.piece.untyped_storage()
        return _users_of_storage is not None and _users_of_storage(storage._cdata) > 2


class View:
    """A piece of one rank, which is the whole parameter in the parameter's own memory, unless it was given other
    data."""

    def __init__(self, piece: torch.Tensor) -> None:
        self.piece = piece
        self.storage = piece.untyped_storage()

    def settle(self, param: torch.Tensor) -> None:
        """The data that it was given is the parameter's, whose memory it shows again."""
        whole = param.detach().as_subclass(torch.Tensor).view(-1)
        values = self.piece.detach()
        given = values.untyped_storage()._cdata != self.storage._cdata or values.shape != whole.shape
        if given or whole.untyped_storage()._cdata != self.storage._cdata:
            self.piece.data = whole
            self.storage = self.piece.untyped_storage()
        if given:
            _check_form(values, whole)
            whole.copy_(values)


def _check_form(piece: torch.Tensor, was: torch.Tensor) -> None:
    if piece.shape != was.shape or piece.dtype != was.dtype:
        raise UsageError(
            f"[deepspeed] p.ds_tensor has become {tuple(piece.shape)} of {piece.dtype}, and was "
            f"{tuple(was.shape)} of {was.dtype}: write values of its own shape"
        )


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_WORDS[tensor.element_size()])


def steps_of(param: torch.Tensor) -> int:
    engine = engine_of(param)
    return 0 if engine is None else engine.global_steps


def settle(params: Iterable[torch.Tensor], state: str) -> None:
    """Gives parameters what was written to their pieces. `state`: the attribute that has what is out. Collective where
    pieces of partitioned parameters are."""
    params = list(params)
    for param in params:
        view = getattr(vars(param).get(state), "view", None)
        if view is not None:
            view.settle(param)
    out = [(param, vars(param)[state]) for param in params if getattr(vars(param).get(state), "lent", None) is not None]
    alone = [(param, kept) for param, kept in out if not kept.lent.shared]
    for _, kept in alone:
        _check_alone(kept)
    # Inside a region the parameter itself is there to be written to.
    by_engine: dict[int, list[Any]] = {}
    for param, kept in out:
        if kept.lent is not None and kept.lent.shared and not _is_open(param):
            by_engine.setdefault(id(engine_of(param)), []).append((param, kept))
    for shared in by_engine.values():
        _settle_shared(shared)


def _settle_shared(shared: list[Any]) -> None:
    """Settles the pieces of one engine, or of none."""
    rows = _rows(shared[0][0], [flag for _, kept in shared for flag in _flags(kept.lent, steps_of(shared[0][0]))])
    held, written, late = rows.view(len(shared), 3).unbind(1)
    if late.any():
        for _, kept in shared:
            kept.lent = None
        raise UsageError(
            "[deepspeed] a piece that was read before an update (p.ds_tensor) was written to after it: read "
            "p.ds_tensor again, and write to that"
        )
    for number, (param, kept) in enumerate(shared):
        if written[number]:
            _write(param, kept.lent)
        if held[number]:
            kept.lent.read(kept.lent.piece, kept.lent.steps)
        else:
            kept.lent = None


def _is_open(param: torch.Tensor) -> bool:
    info = partition_info(param)
    return info is None or info.status is not ParamStatus.NOT_AVAILABLE


def _flags(lent: Lent, steps: int) -> tuple[bool, bool, bool]:
    written = bool(lent.written().any())
    return lent.is_held(), written, written and steps != lent.steps


def _check_alone(kept: Any) -> None:
    written = bool(kept.lent.written().any())
    if written or not kept.lent.is_held():
        kept.lent = None
    if written:
        raise UsageError(
            "[deepspeed] p.ds_tensor of a parameter that every rank holds whole (small ones, and those of a region) is "
            "a copy, and what was written to it is lost: write to p inside zero.GatheredParameters(p, modifier_rank=0)"
        )


def _group(param: torch.Tensor) -> Any:
    engine = engine_of(param)
    if engine is None:
        return core_group()
    mesh = engine.core.mesh()
    if mesh.size([_core.Axis.DpReplicate]) > 1:
        raise UsageError(
            "[deepspeed] p.ds_tensor is not served where several ranks hold the same piece (hybrid sharding): read and "
            "write p inside zero.GatheredParameters(p, modifier_rank=0)"
        )
    return mesh.group(_AXES)


def _all_of(param: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    group = _group(param)
    if group.size == 1:
        return own
    everything = own.new_empty(group.size * own.numel())
    group.all_gather(everything, own.contiguous(), "pieces of parameters")
    return everything


def _rows(param: torch.Tensor, flags: list[bool]) -> torch.Tensor:
    own = torch.tensor(flags, dtype=torch.float32, device=param.device)
    return _all_of(param, own).view(-1, len(flags)).amax(0).cpu() > 0


def _write(param: torch.Tensor, lent: Lent) -> None:
    values = _all_of(param, lent.piece.detach())
    written = _all_of(param, lent.written().to(torch.uint8)) > 0
    with torch.no_grad(), Region(parts_of([param], writable=True), _core.Writes.Own):
        whole = param.detach().as_subclass(torch.Tensor)
        now = whole.reshape(-1)
        count = now.numel()
        whole.copy_(torch.where(written[:count], values[:count], now).view(whole.shape))
    engine = engine_of(param)
    if engine is not None:
        engine.core.adopt_params()
