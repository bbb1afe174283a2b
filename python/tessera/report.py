"""What this environment has of all that Tessera uses: the command `tessera report` (tessera/commands), and what Python
knows of it."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from tessera._command import run

__all__ = ["main"]

_PACKAGES = ("numpy", "safetensors", "transformers", "accelerate", "lightning", "peft", "trl", "tensorboard", "wandb")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> list[str]:
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    module: Any = torch.get_device_module(kind)
    return [f"{kind.type}:{n} {module.get_device_name(n)}" for n in range(torch.accelerator.device_count())]


def _facts() -> list[tuple[str, str]]:
    """Name and JSON value of each."""
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()]
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "packages": {name: there for name in _PACKAGES if (there := _installed(name))},
        "devices": _devices(),
        "transports": ["shared memory (ranks of one host)", *backends],
    }
    return [(name, json.dumps(value)) for name, value in found.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """`tessera report`."""
    return run(["report", *(sys.argv[1:] if argv is None else argv)], facts=_facts())


if __name__ == "__main__":
    sys.exit(main())
