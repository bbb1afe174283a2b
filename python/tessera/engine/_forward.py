"""A forward of an engine's module, between what the core does before and after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, overload

import torch
from torch import nn
from torch.utils import _pytree

from tessera import _core
from tessera._outputs import tensors_in
from tessera.engine._look import Look
from tessera.parallel.engines import TensorParallel
from tessera.sequence.engines import attends_locally
from tessera.zero.engines import Partition

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")


def moved(value: Any, dtype: torch.dtype | None, device: torch.device | None) -> Any:
    """`value`, any nesting of tensors: those of floating point in `dtype`, all on `device`."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    return _pytree.tree_map_only(torch.Tensor, move, value)


class Runs(Protocol):
    """An engine."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def core(self) -> _core.Engine: ...
    @property
    def device(self) -> torch.device: ...


def compute_dtype(engine: Runs) -> torch.dtype:
    """The dtype of the parameters; the precision's where this rank's module has none."""
    dtypes = (param.dtype for param in engine.module.parameters() if param.is_floating_point())
    return next(dtypes, engine.core.options().zero.precision.param)


@overload
def cast_inputs(engine: Runs, value: T, /) -> T: ...
@overload
def cast_inputs(engine: Runs, first: T, second: U, /) -> tuple[T, U]: ...
@overload
def cast_inputs(engine: Runs, first: T, second: U, third: V, /) -> tuple[T, U, V]: ...
@overload
def cast_inputs(engine: Runs, /, *values: T) -> tuple[T, ...]: ...
def cast_inputs(engine: Runs, /, *values: object) -> object:
    """`values`, any nesting of tensors, as the engine's forward takes them: floating point in its compute dtype, and
    all on its device; integers and masks keep their dtype. One value comes back as itself, several as a tuple. FSDP2
    does this to the arguments of a forward; with engine.cast_forward_inputs = True each forward does it. Local."""
    cast = moved(values, compute_dtype(engine), engine.device)
    return cast[0] if len(cast) == 1 else cast


class Forward:
    """`warn`: warns the user; None on ranks that do not. `checks_attention`: ranks share sequences."""

    def __init__(
        self,
        core: _core.Engine,
        parallel: TensorParallel,
        partition: Partition,
        look: Look,
        device: torch.device,
        warn: Callable[[list[str]], None] | None,
        checks_attention: bool,
        casts_inputs: Callable[[], bool],
    ) -> None:
        self._core, self._parallel, self._partition, self._look = core, parallel, partition, look
        self._device, self._warn, self._checks_attention = device, warn, checks_attention
        self.input_dtype: torch.dtype | None = None  # the dtype that inputs are cast to, where this forward's are
        self.input_device: torch.device | None = None  # the device that inputs are moved to
        self._casts_inputs = casts_inputs

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        core, parallel = self._core, self._parallel
        self._look.before_forward()
        if self._checks_attention and self._warn is not None:  # now: registration may come after the engine
            self._checks_attention = False
            self._warn(attends_locally(module))
        if self.input_dtype is not None and self._casts_inputs():
            args, kwargs = moved((args, kwargs), self.input_dtype, self.input_device)
        parallel.before_forward(args, kwargs, self._device)
        with self._partition.forward():
            switched_off = core.pre_forward()
            try:
                if switched_off and self._warn is not None:
                    self._warn([_core.WITHOUT_AUTOCAST])
                outputs = module(*args, **kwargs)
                core.post_forward(tensors_in(outputs))
                parallel.after_forward(self._device)
            except BaseException as error:
                explained = parallel.explained(error)
                if type(error) in (RuntimeError, ValueError):
                    self._explain_inputs(error, module, args, kwargs)
                core.abort_forward()
                raise explained  # noqa: B904 (mostly the same one)
            finally:
                parallel.end_forward(self._device)
        return outputs

    def _explain_inputs(self, error: BaseException, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Adds to the text of `error` which inputs are not what the engine has, and what to do."""
        dtype = next((param.dtype for param in module.parameters() if param.is_floating_point()), None)
        autocast = self._core.options().autocast.enabled
        inputs = [
            (_pytree.keystr(path[1:]), value.dtype, value.device)
            for path, value in _pytree.tree_flatten_with_path((args, kwargs))[0]
            if isinstance(value, torch.Tensor)
        ]
        line = _core.explain_inputs(str(error), dtype, self._device, autocast, inputs)
        if line:
            error.args = (f"{error}\n{line}", *error.args[1:])
