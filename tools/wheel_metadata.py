"""Dynamic metadata of the wheel, for scikit-build-core: the minor version of torch that the wheel is compiled against,
and so runs with (python/tessera/_version.py refuses the others)."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping


def torch_requirement(version: str | None) -> str:
    """ "2.13.0+cpu" -> "torch==2.13.*". Without a torch nothing can be compiled, but an sdist can be made."""
    return "torch" if version is None else f"torch=={'.'.join(version.split('+')[0].split('.')[:2])}.*"


def installed() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def dynamic_metadata(field: str, settings: Mapping[str, object] | None = None) -> list[str]:
    if field != "dependencies" or settings:
        raise ValueError(f"this provider makes dependencies, without settings; asked for {field} with {settings}")
    return [torch_requirement(installed())]
