"""States that an engine which was destroyed has left with its client's optimizer: whole, or this rank's part of them,
with CUT, which says what it is a part of. The states are of an optimizer that runs itself or of the core's alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tessera import _core
from tessera._blobs import CUT, cut_of
from tessera.errors import ConfigError, UsageError

_ADVICE = (
    "destroy() an engine inside zero.GatheredParameters(model.parameters()), on all ranks, and they are whole; "
    "optimizer.state.clear() begins without them"
)


def part_of(core: _core.Engine, number: int) -> list[Any]:
    """The part of a parameter that this rank's states are of."""
    spec, mesh = core.param(number), core.mesh()
    return cut_of(
        *core.local_range(number), list(torch.Tensor.size(spec.tensor)), mesh.rank(spec.varies), mesh.size(spec.varies)
    )


def part_in(core: _core.Engine, number: int, value: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of a value that is whole, or of all of its slice of the model; None for any other value."""
    spec = core.param(number)
    if list(value.shape) == spec.whole_sizes:
        return core.local_part(number, value)
    size = torch.Tensor.size(spec.tensor)
    if value.shape != size:
        return None
    begin, end = core.local_range(number)
    form = torch.empty_strided(size, spec.tensor.stride(), dtype=value.dtype, device=value.device)
    return form.copy_(value).as_strided((size.numel(),), (1,))[begin:end]


def taken(core: _core.Engine, number: int, state: dict[str, Any]) -> dict[str, Any]:
    """The states that the core here takes of such ones. ConfigError where they are a part of another cut."""
    if CUT not in state:
        return state
    begin, end, *of = part_of(core, number)
    if state[CUT] != [begin, end, *of]:
        raise ConfigError(
            f"[optimizer] the states of '{core.param(number).name}' are a part, elements {state[CUT][0]} to "
            f"{state[CUT][1]}, that an engine left which was destroyed; this one has {begin} to {end} on this rank: "
            f"{_ADVICE}"
        )
    return {key: value for key, value in state.items() if key != CUT}


def warn_of_ended(core: _core.Engine, states: Iterable[Any]) -> None:
    """Warns of states that an optimizer brings to a new engine and that ended with another one."""
    ended = sum(CUT in state and len(state) == 1 and state[CUT][0] < state[CUT][1] for state in states if state)
    if ended and core.mesh().rank(list(_core.Axis.__members__.values())) == 0:
        _core.warn(
            f"[optimizer] the states of {ended} parameters were offloaded by an engine and ended with it: this one "
            "begins without them, unless it loads a checkpoint"
        )


def refuse_parts(base: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """A hook before torch's own step, which refuses states that are parts."""
    if not isinstance(base.state, dict):
        return  # an engine's
    parts = [state for state in base.state.values() if CUT in state]
    if parts:
        raise UsageError(
            f"[optimizer.step] the states of {len(parts)} parameters are only the part that this rank had in an engine "
            f"which was destroyed: {_ADVICE}"
        )


def leave(base: torch.optim.Optimizer, states: Mapping[torch.Tensor, dict[str, Any]]) -> None:
    """Gives `base` these states, without an engine. It takes no step with parts among them."""
    base.state.update(states)
    if any(CUT in state for state in states.values()) and refuse_parts not in base._optimizer_step_pre_hooks.values():
        base.register_step_pre_hook(refuse_parts)
