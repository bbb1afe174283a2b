"""`tessera report`: what this environment has of all that Tessera uses."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

import tessera

__all__ = ["collect", "main"]

_PACKAGES = ("numpy", "safetensors", "transformers", "accelerate", "lightning", "peft", "trl", "tensorboard", "wandb")
_FLAGS = ("avx2", "f16c", "avx512f", "avx512_bf16", "amx_bf16")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_flags() -> list[str]:
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line.split() for line in file if line.startswith("flags")), [])
    except OSError:
        return []
    return [name for name in _FLAGS if name in flags]


def _devices() -> list[str]:
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    module: Any = torch.get_device_module(kind)
    return [f"{kind.type}:{n} {module.get_device_name(n)}" for n in range(torch.accelerator.device_count())]


def _free(folder: str) -> dict[str, Any]:
    try:
        use = shutil.disk_usage(folder)
    except OSError:
        return {"folder": folder, "free_gb": None}
    return {"folder": folder, "free_gb": round(use.free / 1e9, 1), "total_gb": round(use.total / 1e9, 1)}


def collect() -> dict[str, Any]:
    """Everything, as plain data."""
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()]
    return {
        "tessera": tessera.__version__,
        "built for torch": tessera._core.torch_version,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _installed(name))},
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "instruction sets": _cpu_flags(),
        "devices": _devices(),
        "transports": ["shared memory (ranks of one host)", *backends],
        "disk": [_free(os.getcwd()), _free("/dev/shm"), _free(os.environ.get("TMPDIR", "/tmp"))],
    }


def _line(name: str, value: Any) -> str:
    if isinstance(value, dict):
        value = ", ".join(f"{key} {item}" for key, item in value.items())
    elif isinstance(value, list):
        value = "; ".join(_plain(item) for item in value) or "none"
    return f"{name:18} {value}"


def _plain(item: Any) -> str:
    if not isinstance(item, dict):
        return str(item)
    return f"{item['folder']} {item['free_gb']} GB free" if item["free_gb"] is not None else f"{item['folder']}: none"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tessera report", description=__doc__)
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    found = collect()
    print(json.dumps(found, indent=2) if options.json else "\n".join(_line(*item) for item in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
