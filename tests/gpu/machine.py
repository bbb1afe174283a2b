"""The stage `env`: what the machine is."""

from __future__ import annotations

import functools
import importlib.metadata as metadata
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from common import CUDA, SMALL, Results, median, times

PACKAGES = (
    *("torch", "triton", "numpy", "transformers", "scikit-build-core", "cmake", "ninja", "nlohmann-json", "deepspeed"),
    *("pytest", "pytest-xdist", "pytest-timeout", "hypothesis", "nvidia-nccl-cu13", "accelerate", "peft", "lightning"),
)
COMMANDS = {
    "g++": ["g++", "--version"],
    "nvcc": ["nvcc", "--version"],
    "cmake": ["cmake", "--version"],
    "uname": ["uname", "-a"],
    "os": ["head", "-n", "3", "/etc/os-release"],
    "cpu": ["lscpu"],
    "memory": ["free", "-g"],
    "disk": ["df", "-h", "/", "/tmp", "/dev/shm"],
    "limits": ["sh", "-c", "ulimit -a"],
    "nvidia-smi": ["nvidia-smi"],
}


def said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return (done.stdout + done.stderr).strip()[-1500:]


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def python() -> dict[str, Any]:
    include = Path(sysconfig.get_path("include"))
    headers = (include / "Python.h").exists()
    return {
        "exe": sys.executable,
        "version": platform.python_version(),
        "libc": platform.libc_ver(),
        "Python.h": headers,
    }


def of_torch() -> dict[str, Any]:
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "available": torch.cuda.is_available(),
        "config": torch.__config__.show(),
        "threads": torch.get_num_threads(),
    }


def device() -> dict[str, Any]:
    names = ("name", "total_memory", "multi_processor_count", "major", "minor")
    properties = torch.cuda.get_device_properties(0)
    found = {name: str(getattr(properties, name)) for name in names}
    return found | {"free and all": torch.cuda.mem_get_info(), "nccl": torch.cuda.nccl.version()}


def bandwidth() -> dict[str, float]:
    n, part = (1 << 20, 1 << 18) if SMALL else (1 << 31, 1 << 29)
    a, b = (torch.empty(n, dtype=torch.uint8, device="cuda") for _ in range(2))
    found = {"d2d_gb_s": 2 * n / median(times(lambda: b.copy_(a), 10)) / 1e6}
    d = a[:part]
    for name, pinned in (("pinned", True), ("pageable", False)):
        h = torch.empty(part, dtype=torch.uint8, pin_memory=pinned)
        for way, to, of in (("h2d", d, h), ("d2h", h, d)):
            ms = median(times(functools.partial(to.copy_, of, non_blocking=True), 5))
            found[f"{way}_{name}_gb_s"] = part / ms / 1e6
    return found


def main() -> None:
    r = Results("env")
    tools = ("compute-sanitizer", "ncu", "nsys", "cuobjdump", "ccache", "ninja")
    r.case("python", python)
    r.case("packages", lambda: {name: version(name) for name in PACKAGES})
    r.case("commands", lambda: {name: said(command) for name, command in COMMANDS.items()})
    r.case("tools", lambda: {name: shutil.which(name) for name in tools})
    r.case("torch", of_torch)
    if CUDA:
        r.case("device", device)
        r.case("bandwidth", bandwidth)
    r.end()


if __name__ == "__main__":
    main()
