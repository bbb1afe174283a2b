"""deepspeed.accelerator: the device of this process, through torch.accelerator."""

from __future__ import annotations

import contextlib
import os
import random as _random
from collections.abc import Callable
from typing import Any

import torch


class Accelerator:
    """The object of get_accelerator(). Names that it lacks are those of torch.cuda, or of torch.cpu."""

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._module = torch.get_device_module(kind)
        self._communication_backend_name = "nccl" if kind == "cuda" else "gloo"

    def _on_cpu(self) -> bool:
        return self._name == "cpu"

    def is_available(self) -> bool:
        return self._on_cpu() or torch.accelerator.is_available()

    def is_synchronized_device(self) -> bool:
        return self._on_cpu()

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or self._on_cpu() else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return contextlib.nullcontext() if self._on_cpu() else self._module.device(device_index)

    def current_device(self) -> int | str:
        return "cpu" if self._on_cpu() else self._module.current_device()

    def current_device_name(self) -> str:
        return "cpu" if self._on_cpu() else f"{self._name}:{self._module.current_device()}"

    def device_count(self) -> int:
        return int(os.environ.get("LOCAL_SIZE", "1")) if self._on_cpu() else self._module.device_count()

    def set_device(self, device_index: int) -> None:
        if not self._on_cpu():
            self._module.set_device(device_index)

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def is_bf16_supported(self) -> bool:
        return self._on_cpu() or self._module.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16] + ([torch.bfloat16] if self.is_bf16_supported() else [])

    def synchronize(self, device_index: int | None = None) -> None:
        if not self._on_cpu():
            self._module.synchronize(device_index)

    def empty_cache(self) -> None:
        if not self._on_cpu():
            self._module.empty_cache()

    def _memory(self, name: str, *args: Any) -> int:
        if not self._on_cpu():
            return getattr(self._module, name)(*args)
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes; on the CPU those of the process."""
        return self._memory("memory_allocated", device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        if self._on_cpu():
            import resource

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return self._module.max_memory_allocated(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if not self._on_cpu():
            self._module.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        if self._on_cpu():
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return self._module.get_device_properties(device_index).total_memory

    def available_memory(self, device_index: int | None = None) -> int:
        if self._on_cpu():
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return self.total_memory(device_index) - self.memory_allocated(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self._memory("memory_reserved", device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self.max_memory_allocated() if self._on_cpu() else self._module.max_memory_reserved(device_index)

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        if not self._on_cpu():
            return self._module.memory_stats(device_index)
        now, peak = self.memory_allocated(), self.max_memory_allocated()
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": peak}

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor if self._on_cpu() else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed) if self._on_cpu() else self._module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed) if self._on_cpu() else self._module.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed() if self._on_cpu() else self._module.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator if self._on_cpu() else self._module.default_generators[device_index]

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback() if self._on_cpu() else self._module._lazy_call(callback)

    def range_push(self, msg: str) -> Any:
        return None if self._on_cpu() else self._module.nvtx.range_push(msg)

    def range_pop(self) -> Any:
        return None if self._on_cpu() else self._module.nvtx.range_pop()

    def get_compile_backend(self) -> str:
        return "inductor"

    def is_triton_supported(self) -> bool:
        return not self._on_cpu()

    def get_op_builder(self, class_name: str) -> Any:
        from deepspeed import _ops

        return getattr(_ops, class_name)

    def create_op_builder(self, class_name: str) -> Any:
        return self.get_op_builder(class_name)()

    def random(self) -> Any:
        return _random if self._on_cpu() else torch.random

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state() if self._on_cpu() else self._module.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state) if self._on_cpu() else self._module.set_rng_state(new_state)

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext() if self._on_cpu() else self._module.stream(stream)

    def _typed(self, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.tensor(*args, **{"dtype": dtype, "device": self.current_device_name(), **kwargs})

        return make

    FloatTensor = property(lambda self: self._typed(torch.float32))
    DoubleTensor = property(lambda self: self._typed(torch.float64))
    HalfTensor = property(lambda self: self._typed(torch.float16))
    BFloat16Tensor = property(lambda self: self._typed(torch.bfloat16))
    IntTensor = property(lambda self: self._typed(torch.int32))
    LongTensor = property(lambda self: self._typed(torch.int64))
    ByteTensor = property(lambda self: self._typed(torch.uint8))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._module, name)


_current: list[Accelerator] = []


def get_accelerator() -> Accelerator:
    """The accelerator that torch has, or the CPU; DS_ACCELERATOR says another one."""
    if not _current:
        found = torch.accelerator.current_accelerator(check_available=True)
        kind = os.environ.get("DS_ACCELERATOR") or ("cpu" if found is None else found.type)
        _current.append(Accelerator(kind))
    return _current[0]


def set_accelerator(accelerator: Any) -> None:
    _current[:] = [accelerator]


# Names of devices for which DeepSpeed has a class, which Tessera reaches through torch.accelerator.
SUPPORTED_ACCELERATOR_LIST = ["cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu"]


def is_current_accelerator_supported() -> bool:
    return get_accelerator().device_name() in SUPPORTED_ACCELERATOR_LIST
