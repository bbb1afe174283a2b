"""Reports what this environment has of all that Tessera uses, and what is missing for more: the command `tessera
report` (tessera/commands), with what Python knows."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from tessera._command import run

__all__ = ["main"]

# Packages, and what each would be for, where it is not there.
_OPTIONAL = {
    "numpy": "its random generator in checkpoints, torch's own conversions",
    "transformers": "models of Hugging Face, `tessera estimate` of a folder",
    "tensorboard": "a look at what the section tensorboard writes",
    "wandb": "the section wandb",
    "comet_ml": "the section comet",
    "ray": "groups of actors, tessera.hybrid",
}
_PACKAGES = (
    "numpy",
    "safetensors",
    "transformers",
    "accelerate",
    "lightning",
    "peft",
    "trl",
    "tensorboard",
    "wandb",
    "ray",
)


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
    missing = [f"no package {name}: {what}" for name, what in _OPTIONAL.items() if find_spec(name) is None]
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "packages": {name: there for name in _PACKAGES if (there := _installed(name))},
        "devices": _devices(),
        "transports": ["shared memory (ranks of one host)", *backends],
        "missing for more": missing,
    }
    return [(name, json.dumps(value)) for name, value in found.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """`tessera report`."""
    return run(["report", *(sys.argv[1:] if argv is None else argv)], facts=_facts())


if __name__ == "__main__":
    sys.exit(main())
