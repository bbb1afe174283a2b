"""Who holds a parameter: an engine's core, or zero.Init before there is one. The mark is an attribute of parameters."""

from __future__ import annotations

import dataclasses
import enum
import weakref
from typing import Any, Protocol

import torch
from torch import nn

from tessera import _core
from tessera._loans import Loans

_HOME = "_tessera_home"  # on parameters: Home
_COPIER = "__deepcopy__"  # _Copier
_PICKLER = "__reduce_ex__"  # _Pickler


class Holder(Protocol):
    """Who holds partitioned parameters: an engine's core, or EarlyParameters before there is one."""

    def gather(self, numbers: list[int], writes: _core.Writes, writer: int, /) -> None: ...
    def release(self, numbers: list[int], writes: _core.Writes, writer: int, /) -> None: ...
    def is_gathered(self, number: int, /) -> bool: ...
    def partition_of(self, number: int, /) -> _core.ParamPartition: ...
    def held_values(self, number: int, /) -> torch.Tensor: ...
    def destroyed(self) -> bool: ...
    def inside_module(self) -> bool: ...


class Hooks(Protocol):
    """The hooks that an engine has put on the modules that use its partitioned parameters (zero/_hooks.py)."""

    hooked_late: set[int]

    def hook(self, module: nn.Module, number: int, /) -> Any: ...


class Mark:
    """The value of an attribute of a parameter that its copies and pickles are made without."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self  # _Copier takes it off

    def __reduce__(self) -> Any:
        return type(None), ()  # in an attribute that is pickled alone


def _marks_in(attributes: dict[str, Any]) -> list[str]:
    return [name for name, value in attributes.items() if isinstance(value, Mark)]


class Home(Mark):
    """Where a parameter lives: its holder, its number there, with an engine that engine, and, where the engine
    partitions, the hooks around it."""

    __slots__ = ("engine", "holder", "number", "partition")

    def __init__(
        self, holder: Holder, number: int, engine: object | None = None, partition: Hooks | None = None
    ) -> None:
        self.holder = weakref.ref(holder)
        self.number = number
        self.engine = None if engine is None else weakref.ref(engine)
        self.partition = None if partition is None else weakref.ref(partition)


class _OfParam(Mark):
    __slots__ = ("_param",)

    def __init__(self, param: torch.Tensor) -> None:
        self._param = weakref.ref(param)

    @property
    def param(self) -> torch.Tensor:
        param = self._param()
        assert param is not None
        return param


class _Copier(_OfParam):
    """copy.deepcopy of a parameter: makes a whole one, in nobody's care. Collective for a partitioned one, unless that
    is whole."""

    __slots__ = ()

    def __call__(self, memo: dict[int, Any]) -> Any:
        made = self._copy(memo)
        for name in _marks_in(vars(made)):
            del vars(made)[name]
        return made

    def _copy(self, memo: dict[int, Any]) -> Any:
        param = self.param
        home: Home = vars(param)[_HOME]
        found = holder_of(param)
        partitions = home.engine is None or home.partition is not None
        if found is None or not partitions or found[0].is_gathered(found[1]):
            return type(param).__deepcopy__(param, memo)
        holder, number = found
        holder.gather([number], _core.Writes.None_, 0)
        try:
            return type(param).__deepcopy__(param, memo)
        finally:
            holder.release([number], _core.Writes.None_, 0)


class _Pickler(_OfParam):
    """The form in which pickle and torch.save write a parameter, whole or with an error: one in nobody's care, of plain
    data."""

    __slots__ = ()

    def __call__(self, protocol: Any) -> Any:
        param = self.param
        attributes = vars(param)
        marks = {name: attributes.pop(name) for name in _marks_in(attributes)}
        try:
            make, arguments, *rest = type(param).__reduce_ex__(param, protocol)
            # What is made of the arguments is written later, when the marks are there again.
            return (make, tuple(dict(one) if one is attributes else one for one in arguments), *rest)
        finally:
            attributes.update(marks)


def set_home(param: torch.Tensor, home: Home, loans: Loans | None = None) -> None:
    """`loans`: takes it off again, and what was there before."""
    for name, value in ((_HOME, home), (_COPIER, _Copier(param)), (_PICKLER, _Pickler(param))):
        vars(param).pop(name, None)
        if loans is None:
            vars(param)[name] = value
        else:
            loans.put(param, name, value)


def holder_of(param: torch.Tensor) -> tuple[Holder, int] | None:
    """Who holds `param` now, and the parameter's number there."""
    home: Home | None = getattr(param, _HOME, None)
    holder = None if home is None else home.holder()
    return None if home is None or holder is None or holder.destroyed() else (holder, home.number)


def engine_of(param: torch.Tensor) -> Any:
    """The live engine of the front end that holds `param`, in any stage; None without one."""
    home: Home | None = getattr(param, _HOME, None)
    if home is None or home.engine is None or holder_of(param) is None:
        return None
    return home.engine()


def home_of(param: torch.Tensor) -> tuple[_core.Engine, int] | None:
    """The live core that partitions parameters, `param` among them, and the parameter's number there."""
    found = holder_of(param)
    if found is None or not isinstance(found[0], _core.Engine) or getattr(param, _HOME).partition is None:
        return None
    return found[0], found[1]


def hooks_of(param: torch.Tensor) -> Hooks | None:
    """The hooks of the modules that use `param`, where a live core partitions it."""
    home: Home | None = getattr(param, _HOME, None)
    return None if home is None or home.partition is None or home_of(param) is None else home.partition()


class ParamStatus(enum.Enum):
    """The place where the values of a partitioned parameter are."""

    AVAILABLE = 1  # whole
    NOT_AVAILABLE = 2  # partitioned
    INFLIGHT = 3  # being gathered


_STATUS = {
    _core.ParamState.Ready: ParamStatus.AVAILABLE,
    _core.ParamState.Sharded: ParamStatus.NOT_AVAILABLE,
    _core.ParamState.Gathering: ParamStatus.INFLIGHT,
}


@dataclasses.dataclass(frozen=True)
class PartitionInfo:
    """How a parameter is held now on this rank."""

    status: ParamStatus
    partitioned: (
        bool  # False: whole on every rank at all times (small parameters, other stages, one rank without offload)
    )
    begin: int  # this rank's elements of the flattened parameter: [begin, end); slices of ranks need not be equal
    end: int
    _holder: Holder
    _number: int

    @property
    def local(self) -> torch.Tensor:
        """Their values now, 1-D, for reading: a view, or a copy where they do not live on the device."""
        return self._holder.held_values(self._number)


def partition_info(param: torch.Tensor) -> PartitionInfo | None:
    """What an engine, or zero.Init, knows of `param`; None where neither holds it. Local."""
    found = holder_of(param)
    if found is None:
        return None
    holder, number = found
    core = holder.partition_of(number)
    return PartitionInfo(_STATUS[core.state], core.partitioned, *core.held, holder, number)
