"""setuptools, after a look into the environment: an installation of DeepSpeed itself is not replaced silently."""

from __future__ import annotations

import sysconfig
from importlib.metadata import distributions
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def refuse_beside_deepspeed(folders: list[str]) -> None:
    """Isolated builds see no installed package, but they know the environment's folders."""
    for found in distributions(name="deepspeed", path=folders):
        if "tessera" not in found.version:
            raise SystemExit(
                f"[deepspeed_alias] DeepSpeed {found.version} is installed in this environment, and this package would "
                "take its place. Remove it first (pip uninstall deepspeed), or use another environment."
            )


def _folders() -> list[str]:
    return sorted({sysconfig.get_path(kind) for kind in ("purelib", "platlib")})


def build_wheel(*args: Any, **kwargs: Any) -> str:
    refuse_beside_deepspeed(_folders())
    return build_meta.build_wheel(*args, **kwargs)


def build_editable(*args: Any, **kwargs: Any) -> str:
    refuse_beside_deepspeed(_folders())
    return build_meta.build_editable(*args, **kwargs)
