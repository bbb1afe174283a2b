"""Dynamic metadata of the wheel, for scikit-build-core: the minor version of torch that the wheel is compiled against,
and so runs with (python/tessera/_version.py refuses the others); and its own version, which has a label where
TESSERA_WHEEL_LABEL says one (tools/wheels.py: "torch2.13.cpu")."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping
from pathlib import Path

VERSION_FILE = Path(__file__).resolve().parent.parent / "tessera" / "base" / "version.h"


def torch_requirement(version: str | None) -> str:
    """ "2.13.0+cpu" -> "torch==2.13.*". Without a torch nothing can be compiled, but an sdist can be made."""
    return "torch" if version is None else f"torch=={'.'.join(version.split('+')[0].split('.')[:2])}.*"


def installed() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def own_version(label: str = "") -> str:
    """ "0.1.0", or "0.1.0+torch2.13.cpu"."""
    found = re.search(r'define TESSERA_VERSION "([0-9.]+)"', VERSION_FILE.read_text())
    assert found is not None
    return f"{found[1]}+{label}" if label else found[1]


def dynamic_metadata(field: str, settings: Mapping[str, object] | None = None) -> str | list[str]:
    if field == "version" and not settings:
        return own_version(os.environ.get("TESSERA_WHEEL_LABEL", ""))
    if field != "dependencies" or settings:
        raise ValueError(
            f"this provider makes version and dependencies, without settings; asked for {field} with {settings}"
        )
    return [torch_requirement(installed())]
