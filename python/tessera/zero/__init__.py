"""Partitioned parameters for users: regions in which they are whole, parameters used by other modules, leaf modules,
and construction of models that do not fit one rank."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tessera import _core
from tessera.errors import UsageError
from tessera.zero import _leaf
from tessera.zero._hooks import EXTERNAL, Holder, gathered, holder_of, use_in
from tessera.zero._init import Init
from tessera.zero._leaf import *  # noqa: F403

__all__ = [
    *_leaf.__all__,
    "GatheredParameters",
    "Init",
    "ParamStatus",
    "PartitionInfo",
    "partition_info",
    "register_external_parameter",
    "unregister_external_parameter",
]


class ParamStatus(enum.Enum):
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
    partitioned: bool  # False: whole on every rank at all times (small parameters, other stages, one rank)
    begin: int  # this rank's elements of the flattened parameter: [begin, end); slices of ranks need not be equal
    end: int
    local: torch.Tensor  # theirs, 1-D; a view, for reading


def partition_info(param: torch.Tensor) -> PartitionInfo | None:
    """What an engine, or zero.Init, knows of `param`; None where neither holds it. Local."""
    found = holder_of(param)
    if found is None:
        return None
    holder, number = found
    core = holder.partition_of(number)
    return PartitionInfo(_STATUS[core.state], core.partitioned, *core.held, core.values)


class GatheredParameters:
    """Inside the `with`, `params` (one parameter, a list or any iterable) are whole; afterwards partitioned again.

    Collective: every rank opens and closes the region with the same parameters. Parameters that are not partitioned
    pass through; those of a model that zero.Init built need no engine. `modifier_rank`: what that rank (of the
    data-parallel group) writes holds on all ranks; None: writing is an error (UsageError, when the region ends).
    With tessera.shared_parameters `modifier_rank` counts for parameters that are not partitioned, too.
    `fwd_module`: also registers the parameters as external to that module. Regions must not overlap. A whole unit is
    gathered, also for one parameter of it.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, torch.Tensor):
            params = [params]
        self._params = list(params) if enabled else []
        self._rank = modifier_rank
        self._open: list[tuple[Holder, list[int]]] = []
        if fwd_module is not None:
            for param in self._params:
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> None:
        unique = {id(param): param for param in self._params}
        self._open = gathered(unique.values(), writable=self._rank is not None)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        groups, self._open = self._open, []
        writes = _core.Writes.None_ if self._rank is None or error is not None else _core.Writes.FromRank
        for holder, numbers in groups:
            if holder.destroyed():
                continue
            try:
                holder.release(numbers, writes, self._rank or 0)
            except RuntimeError as failure:
                if error is None:
                    raise UsageError(str(failure)) from None


def register_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """`module`, which does not own `parameter`, uses it in its forward: it is gathered there too. Before or after
    tessera.initialize. A parameter that is read as an attribute in a forward registers itself."""
    if not isinstance(parameter, nn.Parameter):
        raise UsageError(f"[zero] register_external_parameter takes a Parameter, got {type(parameter).__name__}")
    known = module.__dict__.setdefault(EXTERNAL, [])
    if not any(parameter is other for other in known):
        known.append(parameter)
    use_in(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Undoes register_external_parameter for engines built from now on."""
    known = module.__dict__.get(EXTERNAL, [])
    kept = [other for other in known if other is not parameter]
    if not isinstance(parameter, nn.Parameter) or len(kept) == len(known):
        raise UsageError("[zero] unregister_external_parameter: the parameter is not registered for this module")
    module.__dict__[EXTERNAL] = kept
