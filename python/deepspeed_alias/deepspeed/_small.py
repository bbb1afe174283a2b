"""Small helpers that programs import from DeepSpeed."""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

import torch
from tessera.distributed import DEFAULT_TIMEOUT
from tessera.errors import ConfigError

from deepspeed._accelerator import get_accelerator
from deepspeed._logging import logger

F = TypeVar("F", bound=Callable[..., Any])

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500


def timeout_of_environment() -> datetime.timedelta | None:
    """DEEPSPEED_TIMEOUT, in minutes. ConfigError for what is no number of minutes."""
    text = os.environ.get("DEEPSPEED_TIMEOUT")
    if not text:
        return None
    with contextlib.suppress(ValueError, OverflowError):
        found = datetime.timedelta(minutes=float(text))
        if found > datetime.timedelta():
            return found
    raise ConfigError(f"[init_distributed] DEEPSPEED_TIMEOUT must be a number of minutes, more than 0, got {text!r}")


def _default_timeout() -> datetime.timedelta:
    with contextlib.suppress(ConfigError):  # init_distributed() says it, an import nothing
        return timeout_of_environment() or DEFAULT_TIMEOUT
    return DEFAULT_TIMEOUT


default_pg_timeout = _default_timeout()


class OnDevice:
    """Inside, modules are built on `device` (meta: without memory) in `dtype`."""

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled

    def __enter__(self) -> OnDevice:
        if self._enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._enabled:
            self._device.__exit__(*error)
            torch.set_default_dtype(self._before)


def instrument_w_nvtx(func: F) -> F:
    """A range of the function's name in torch.profiler."""

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(func.__qualname__):
            return func(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Returns `item` with what is in it on `device`: tensors, and whatever has a to(), in lists, tuples, mappings and
    any of these in one another, which keep their classes. With a criterion, only the tensors that it wants, in
    place."""

    def moved(value: Any) -> Any:
        return move_to_device(value, device, criterion_func)

    if criterion_func is not None and isinstance(item, torch.Tensor):
        if criterion_func(item):
            item.data = item.data.to(device)
        return item
    if criterion_func is None and hasattr(item, "to"):  # a batch of a tokenizer and a PackedSequence, too
        return item.to(device)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*map(moved, item))
    if isinstance(item, (list, tuple)):
        return type(item)(map(moved, item))
    if isinstance(item, MutableMapping):
        held = copy.copy(item)  # with what its class has beside its items
        for key, value in item.items():
            held[key] = moved(value)
        return held
    if isinstance(item, Mapping):
        return {key: moved(value) for key, value in item.items()}
    return item


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    """Returns `item` with those of its tensors that the criterion wants on `device`, in lists, tuples and dicts."""
    if isinstance(item, (list, tuple)):
        return type(item)(copy_to_device(value, device, criterion_func) for value in item)
    if isinstance(item, dict):
        return {key: copy_to_device(value, device, criterion_func) for key, value in item.items()}
    return item.to(device) if criterion_func(item) else item


def empty_cache() -> None:
    get_accelerator().empty_cache()


def see_memory_usage(message: str, force: bool = False) -> None:
    if force:
        device = get_accelerator()
        now, peak = device.memory_allocated() / 2**30, device.max_memory_allocated() / 2**30
        logger.info("%s: %.2f GB in use, %.2f GB at the peak", message, now, peak)


def is_model_parallel_parameter(param: torch.Tensor) -> bool:
    return bool(getattr(param, "tensor_model_parallel", False) or getattr(param, "model_parallel", False))


def is_moe_param(param: torch.Tensor) -> bool:
    return getattr(param, "allreduce", True) is False


def get_global_norm(norm_list: Iterable[float]) -> float:
    return sum(norm**2 for norm in norm_list) ** 0.5


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0, mpu: Any = None) -> torch.Tensor:
    """torch's, for parameters whose gradients are in p.grad (stage 0)."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def ensure_directory_exists(filename: str) -> None:
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


def set_random_seed(seed: int) -> None:
    import random

    random.seed(seed)
    torch.manual_seed(seed)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """The text of a call."""
    arguments = [repr(arg) for arg in args] + [f"{name}={value!r}" for name, value in kwargs.items()]
    return f"{base}({', '.join(arguments)})"


def noop_decorator(func: F) -> F:
    return func


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    from packaging.version import Version

    running = Version(torch.__version__).release[:2]
    low = Version(str(min_version)).release if min_version is not None else (0,)
    high = Version(str(max_version)).release if max_version is not None else (10**6,)
    return low <= running <= high


def is_compile_supported() -> bool:
    return hasattr(torch, "compile")
