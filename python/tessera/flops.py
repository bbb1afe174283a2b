"""How many operations, parameters and milliseconds the modules of a model take in one forward.

Operations are what the core counts, by the formulas of torch.utils.flop_counter: matrix products, convolutions and
attention, a multiplication and an addition two operations; element-wise work is not counted. A backward counts twice
the forward.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tessera import _core

__all__ = ["FlopsProfiler", "ModuleProfile", "get_model_profile"]

_SIZE = torch.Tensor.size  # whatever a class of parameters shows as its size
number_text = _core.number_text


@dataclasses.dataclass
class ModuleProfile:
    """One module's part, everything below it included."""

    name: str  # "" is the model
    kind: str
    depth: int
    params: int
    flops: int = 0
    seconds: float = 0.0
    timed: bool = False  # it was called: a ModuleList is not, and what is in it is


class _Eager(TorchDispatchMode):
    """Changes nothing; while any mode is on, torch.compile runs modules as they stand, with their hooks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class FlopsProfiler:
    """Profiles this thread's forwards between start_profile() and stop_profile(); hooks are there in between only."""

    def __init__(self, model: nn.Module, recompute_fwd_factor: float = 0.0) -> None:
        """`recompute_fwd_factor`: the share of the forward that checkpointed activations compute again."""
        self.model = model
        self.core = _core.FlopsProfile(recompute_fwd_factor)
        self._hooks: list[Any] = []
        self._eager: _Eager | None = None

    @property
    def started(self) -> bool:
        """Whether it counts."""
        return self.core.started

    @property
    def recompute_fwd_factor(self) -> float:
        """The share of the forward that checkpointed activations compute again."""
        return self.core.recompute

    @recompute_fwd_factor.setter
    def recompute_fwd_factor(self, factor: float) -> None:
        self.core.recompute = factor

    def start_profile(self, ignore_list: list[type] | None = None) -> None:
        """`ignore_list`: classes whose modules, with all below them, are left out of the report."""
        if self.started:
            return
        rows: list[tuple[str, str, int]] = []
        for name, module in self.model.named_modules():
            if ignore_list and any(isinstance(m, tuple(ignore_list)) for m in _path(self.model, name)):
                continue
            entered = functools.partial(self.core.enter, len(rows))
            left = functools.partial(self.core.leave, len(rows))
            rows.append((name, type(module).__name__, sum(_SIZE(p).numel() for p in module.parameters())))
            self._hooks.append(module.register_forward_pre_hook(entered, prepend=True))
            self._hooks.append(module.register_forward_hook(left, always_call=True))
        self.core.start(rows)
        if "torch._dynamo" in sys.modules:  # where anything may be compiled
            self._eager = _Eager()
            self._eager.__enter__()

    def stop_profile(self) -> None:
        """Ends counting; what was counted stays."""
        if self._eager is not None:
            self._eager.__exit__(None, None, None)
            self._eager = None
        self.core.stop()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def reset_profile(self) -> None:
        """Forgets what was counted."""
        self.core.reset()

    def end_profile(self) -> None:
        """Takes everything off the model; what was counted can still be asked for."""
        self.stop_profile()

    # ---------------------------------------------------------------- results

    def modules(self) -> list[ModuleProfile]:
        """The model first, then what is in it, in the order of named_modules()."""
        return [ModuleProfile(*row) for row in self.core.rows()]

    @overload
    def get_total_flops(self, as_string: Literal[False] = ...) -> int: ...
    @overload
    def get_total_flops(self, as_string: bool) -> int | str: ...
    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Operations of the forwards, and of what is computed again."""
        return number_text(self.core.operations, "FLOPs") if as_string else self.core.operations

    @overload
    def get_total_macs(self, as_string: Literal[False] = ...) -> int: ...
    @overload
    def get_total_macs(self, as_string: bool) -> int | str: ...
    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiplications with an addition, of the forwards."""
        return number_text(self.core.multiply_adds, "MACs") if as_string else self.core.multiply_adds

    @overload
    def get_total_duration(self, as_string: Literal[False] = ...) -> float: ...
    @overload
    def get_total_duration(self, as_string: bool) -> float | str: ...
    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds."""
        return f"{self.core.seconds * 1e3:.2f} ms" if as_string else self.core.seconds

    @overload
    def get_total_params(self, as_string: Literal[False] = ...) -> int: ...
    @overload
    def get_total_params(self, as_string: bool) -> int | str: ...
    def get_total_params(self, as_string: bool = False) -> int | str:
        """Elements of the model's parameters."""
        return number_text(self.core.parameters, "") if as_string else self.core.parameters

    def report(self, profile_step: int = 1, module_depth: int = -1, top_modules: int = 1, detailed: bool = True) -> str:
        """The totals, the `top_modules` with most operations of every level down to `module_depth` (-1: the deepest),
        and with `detailed` a line for each module."""
        return self.core.text(profile_step, module_depth, top_modules, detailed)

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """report() on standard output, or at the end of a file."""
        text = self.report(profile_step, module_depth, top_modules, detailed)
        if output_file is None:
            print(text, flush=True)
        else:
            with open(output_file, "a") as file:
                file.write(text + "\n")


def _path(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules from the model down to that of the name."""
    path = [model]
    for part in name.split(".") if name else []:
        path.append(path[-1].get_submodule(part))
    return path


@overload
def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: Literal[True] = True,
    output_file: str | None = None,
    ignore_modules: list[type] | None = None,
    mode: str = "forward",
) -> tuple[str, str, str]: ...
@overload
def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    *,
    as_string: Literal[False],
    output_file: str | None = None,
    ignore_modules: list[type] | None = None,
    mode: str = "forward",
) -> tuple[int, int, int]: ...
def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: list[type] | None = None,
    mode: str = "forward",
) -> tuple[str | int, str | int, str | int]:
    """(operations, multiply-adds, parameters) of one call of `model`, without gradients: with a float tensor of ones of
    `input_shape`, or with `args` and `kwargs`. `mode`: "forward" or "generate"."""
    if mode not in ("forward", "generate"):
        raise ValueError(f"[get_model_profile] mode must be 'forward' or 'generate', got {mode!r}")
    if input_shape is not None:
        first = next(model.parameters(), torch.empty(0))
        args = [torch.ones(input_shape, dtype=first.dtype, device=first.device)]
    if not args and not kwargs:
        raise ValueError("[get_model_profile] give input_shape, args or kwargs")
    call: Callable[..., Any] = model if mode == "forward" else getattr(model, "generate")  # noqa: B009
    profiler = FlopsProfiler(model)
    with torch.no_grad():
        for _ in range(warm_up):
            call(*args, **(kwargs or {}))
        profiler.start_profile(ignore_modules)
        try:
            call(*args, **(kwargs or {}))
        finally:
            profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(1, module_depth, top_modules, detailed, output_file)
    return profiler.get_total_flops(as_string), profiler.get_total_macs(as_string), profiler.get_total_params(as_string)
