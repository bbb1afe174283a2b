"""The state dict of an engine's module, and regions in which its parameters are whole."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from tessera import _core
from tessera._copies import own_copies
from tessera._former import renamed, takes_former
from tessera.engine._on_all import on_all
from tessera.parallel.engines import TensorParallel
from tessera.zero.engines import Region, parts_of


class HasWeights(Protocol):
    """An engine, whose module a user may exchange."""

    @property
    def core(self) -> _core.Engine: ...
    @property
    def module(self) -> nn.Module: ...
    @property
    def _parallel(self) -> TensorParallel: ...
    @property
    def _settings(self) -> _core.Config: ...
    def param_number(self, param: torch.Tensor) -> int | None: ...
    def _whole(self) -> contextlib.AbstractContextManager[bool]: ...


def _check_values(state: dict[str, Any], module: nn.Module) -> None:
    """Of what torch notices when some of the module has changed already."""
    tensors = itertools.chain(module.named_parameters(remove_duplicate=False), module.named_buffers())
    found = ((name, state.get(name), own) for name, own in tensors)
    _core.check_fit([(name, value, own) for name, value, own in found if isinstance(value, torch.Tensor)])


def _taken(module: nn.Module, values: dict[str, Any]) -> dict[int, tuple[nn.Parameter, torch.Tensor]]:
    """What the parameters have of `values`, by their ids: all but those that a module makes something else of."""
    taken = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        value = values.get(name)
        if not isinstance(value, torch.Tensor) or value.dtype == param.dtype or value.shape != param.shape:
            continue
        if torch.allclose(param.detach(), value.detach().to(param), rtol=0, atol=0, equal_nan=True):
            taken[id(param)] = (param, value.detach())
    return taken


class Weights:
    def __init__(self, engine: HasWeights) -> None:
        self._engine = engine

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Returns module.state_dict(), on request without frozen parameters. Stage 3 and tensor parallelism: whole
        values, copied; collective. It is collective, too, where an update runs on (finish_update())."""
        module = self._engine.module
        with self._engine._whole() as partitioned:
            into: Any = destination
            state: dict[str, Any] = module.state_dict(destination=into, prefix=prefix, keep_vars=keep_vars)
            if partitioned:
                try:
                    state.update(own_copies(state))
                except torch.OutOfMemoryError as error:
                    raise torch.OutOfMemoryError(
                        f"{error} ([engine.module_state_dict] no memory for copies of the whole parameters)"
                    ) from None
            self._engine._parallel.make_whole(state, prefix)
        if exclude_frozen_parameters:
            for name, param in module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        return state

    @takes_former(renamed("Engine.load_module_state_dict", fetch_z3_params=None))
    def load_module_state_dict(
        self,
        checkpoint: dict[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[[dict[str, Any], nn.Module], None] | None = None,
    ) -> None:
        """module.load_state_dict(); the masters follow: values of another dtype than the parameter's come to its master
        as they are; of its own, elements that do not change keep the bits of theirs. Every rank loads the same values.
        ConfigError, with nothing changed, for values that no tensor of the module can take. Collective."""
        core, module = self._engine.core, self._engine.module
        if custom_load_fn is None:
            with on_all(core) if self._engine._settings.placements.shards_params else contextlib.nullcontext():
                _check_values(checkpoint, module)
        # A region in any stage: it sees what a custom function writes to p.data, too.
        everything = list(range(len(core.params())))
        with Region([(core, everything)], _core.Writes.Own):
            if custom_load_fn is not None:
                custom_load_fn(checkpoint, module)
                taken: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
            else:
                values = self._engine._parallel.slices(checkpoint)
                module.load_state_dict(values, strict=strict)
                taken = _taken(module, values)
        rounds = False
        for param, value in taken.values():
            number = self._engine.param_number(param)
            if number is not None and core.set_unrounded(number, value):
                rounds = True
        if rounds:
            core.refresh_params()
        else:
            core.adopt_params()

    @contextlib.contextmanager
    def whole(self) -> Iterator[bool]:
        """A region in which all parameters are whole. Collective in stage 3; True where it gathers any."""
        core = self._engine.core
        if not core.destroyed():
            core.finish_update()
        if core.destroyed() or not self._engine._settings.placements.shards_params:
            yield False
            return
        with Region(parts_of(self._engine.module.parameters(), writable=False)):
            yield True
