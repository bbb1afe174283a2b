"""Where the models of a benchmark are: what measuring needs to know of a device. Memory is this process's on the CPU,
and torch's allocations on an accelerator."""

from __future__ import annotations

import memory
import torch

CPU = "cpu"


def default() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator else CPU


def finish(device: str) -> None:
    """Waits until the device has done what was asked of it."""
    if device != CPU:
        torch.accelerator.synchronize()


def held(device: str) -> int:
    """Bytes."""
    return memory.held() if device == CPU else torch.accelerator.memory_allocated()


def start_peak(device: str) -> int:
    """A new peak; the bytes that it starts from."""
    if device == CPU:
        memory.trim()
        memory.reset_peak()
        return memory.now()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    return torch.accelerator.memory_allocated()


def peak(device: str) -> int:
    return memory.peak() if device == CPU else torch.accelerator.max_memory_allocated()


def room(device: str) -> float:
    """Bytes that models may take together. The CPU's are small."""
    return float("inf") if device == CPU else float(torch.accelerator.get_memory_info()[0])


def title(device: str) -> str:
    """For reports."""
    name = torch.cuda.get_device_name() if device == "cuda" else device
    return f"{name} ({device})" if name != device else device
