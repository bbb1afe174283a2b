"""How many operations, parameters and milliseconds the modules of a model take in one forward.

Operations are what torch.utils.flop_counter counts: matrix products, convolutions and attention, a multiplication and
an addition two operations; element-wise work is not counted. A backward counts twice the forward.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

__all__ = ["FlopsProfiler", "ModuleProfile", "get_model_profile"]

_SIZE = torch.Tensor.size  # whatever a class of parameters shows as its size


@dataclasses.dataclass
class ModuleProfile:
    """One module's part, everything below it included."""

    name: str  # "" is the model
    kind: str
    depth: int
    params: int
    flops: int = 0
    seconds: float = 0.0


class FlopsProfiler:
    """Profiles the forwards between start_profile() and stop_profile(); hooks are there in between only."""

    def __init__(self, model: nn.Module, recompute_fwd_factor: float = 0.0) -> None:
        """`recompute_fwd_factor`: the share of the forward that checkpointed activations compute again."""
        self.model = model
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._counter: FlopCounterMode | None = None
        self._hooks: list[Any] = []
        self._began: dict[int, list[tuple[float, int]]] = {}  # calls under way: the time, operations so far
        self._found: list[ModuleProfile] = []

    def start_profile(self, ignore_list: list[type] | None = None) -> None:
        """`ignore_list`: classes whose modules, with all below them, are left out of the report."""
        if self.started:
            return
        from torch.utils.flop_counter import FlopCounterMode  # imports much

        self.started = True
        self._found = []
        seen: set[int] = set()
        for name, module in self.model.named_modules():
            if ignore_list and any(isinstance(m, tuple(ignore_list)) for m in _path(self.model, name)):
                continue
            if id(module) in seen:
                continue
            seen.add(id(module))
            params = sum(_SIZE(p).numel() for p in module.parameters())
            depth = name.count(".") + 1 if name else 0
            found = ModuleProfile(name, type(module).__name__, depth, params)
            self._found.append(found)
            self._hooks.append(module.register_forward_pre_hook(self._entered, prepend=True))
            self._hooks.append(module.register_forward_hook(self._left(found), always_call=True))
        self._counter = FlopCounterMode(display=False)
        self._counter.__enter__()

    def _entered(self, module: nn.Module, _: Any) -> None:
        self._began.setdefault(id(module), []).append((time.perf_counter(), self._counted()))

    def _counted(self) -> int:
        return 0 if self._counter is None else self._counter.get_total_flops()

    def _left(self, found: ModuleProfile) -> Callable[..., None]:
        def hook(module: nn.Module, *_: Any) -> None:
            began = self._began.get(id(module))
            if began:
                when, flops = began.pop()
                found.seconds += time.perf_counter() - when
                found.flops += self._counted() - flops

        return hook

    def stop_profile(self) -> None:
        """Ends counting; what was counted stays."""
        if not self.started or self._counter is None:
            return
        self._counter.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.started = [], False
        self._began.clear()

    def reset_profile(self) -> None:
        """Forgets what was counted."""
        self._found = []

    def end_profile(self) -> None:
        """Takes everything off the model; what was counted can still be asked for."""
        self.stop_profile()

    # ---------------------------------------------------------------- results

    def modules(self) -> list[ModuleProfile]:
        """The model first, then what is in it, in the order of named_modules()."""
        return list(self._found)

    def _root(self) -> ModuleProfile:
        return self._found[0] if self._found else ModuleProfile("", "", 0, 0)

    @overload
    def get_total_flops(self, as_string: Literal[False] = ...) -> int: ...
    @overload
    def get_total_flops(self, as_string: bool) -> int | str: ...
    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Operations of the forwards, and of what is computed again."""
        flops = int(self._root().flops * (1 + self.recompute_fwd_factor))
        return number_text(flops, "FLOPs") if as_string else flops

    @overload
    def get_total_macs(self, as_string: Literal[False] = ...) -> int: ...
    @overload
    def get_total_macs(self, as_string: bool) -> int | str: ...
    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiplications with an addition, of the forwards."""
        macs = self._root().flops // 2
        return number_text(macs, "MACs") if as_string else macs

    @overload
    def get_total_duration(self, as_string: Literal[False] = ...) -> float: ...
    @overload
    def get_total_duration(self, as_string: bool) -> float | str: ...
    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds."""
        seconds = self._root().seconds
        return f"{seconds * 1e3:.2f} ms" if as_string else seconds

    @overload
    def get_total_params(self, as_string: Literal[False] = ...) -> int: ...
    @overload
    def get_total_params(self, as_string: bool) -> int | str: ...
    def get_total_params(self, as_string: bool = False) -> int | str:
        """Elements of the model's parameters."""
        params = self._root().params
        return number_text(params, "") if as_string else params

    def report(self, profile_step: int = 1, module_depth: int = -1, top_modules: int = 1, detailed: bool = True) -> str:
        """The totals, the `top_modules` with most operations of every level down to `module_depth` (-1: the deepest),
        and with `detailed` a line for each module."""
        deepest = max((m.depth for m in self._found), default=0)
        last = deepest if module_depth < 0 else min(module_depth, deepest)
        lines = [
            f"flops profile of step {profile_step}: {type(self.model).__name__}",
            f"  parameters {self.get_total_params(True)}, forward {self.get_total_macs(True)}, "
            f"{number_text(self._root().flops, 'FLOPs')}, {self.get_total_duration(True)}",
            f"  with backward {number_text(self._root().flops * 2 + self.get_total_flops(), 'FLOPs')}",
        ]
        for depth in range(1, last + 1):
            level = sorted((m for m in self._found if m.depth == depth), key=lambda m: -m.flops)[:top_modules]
            lines += [f"  depth {depth}: {', '.join(map(self._line, level))}"] if level else []
        if detailed:
            shown = [m for m in self._found if m.depth <= last]
            lines += ["  modules:", *("    " + "  " * m.depth + self._line(m) for m in shown)]
        return "\n".join(lines)

    def _line(self, found: ModuleProfile) -> str:
        share = found.flops / self._root().flops if self._root().flops else 0.0
        return (
            f"{found.name or 'model'} ({found.kind}): {number_text(found.params, 'params')}, "
            f"{number_text(found.flops, 'FLOPs')} ({share:.0%}), {found.seconds * 1e3:.2f} ms"
        )

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


def number_text(value: float, unit: str) -> str:
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= factor:
            return f"{value / factor:.2f} {prefix}{unit}"
    return f"{value:g} {unit}".strip()


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
