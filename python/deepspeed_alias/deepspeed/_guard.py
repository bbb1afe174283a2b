"""DeepSpeed itself and this package in one environment: an error, unless the environment says which one it wants."""

from __future__ import annotations

import os
from importlib.metadata import distributions
from pathlib import Path

CHOICE = "TESSERA_DEEPSPEED_ALIAS"  # 1: this package, beside an installed DeepSpeed


def refuse_beside_deepspeed(file: str) -> None:
    """ImportError where a distribution of DeepSpeed is installed that this package hides."""
    if os.environ.get(CHOICE) == "1":
        return
    for found in distributions(name="deepspeed"):
        if "tessera" not in found.version:
            raise ImportError(
                f"[deepspeed] DeepSpeed {found.version} is installed here and would be hidden by Tessera's package of "
                f"the same name ({Path(file).parent}). Remove one of them (pip uninstall deepspeed removes DeepSpeed), "
                f"or set {CHOICE}=1 to use Tessera's in this process"
            )
