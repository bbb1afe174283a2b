"""Which layers a part of a pipeline has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from tessera._core import split_weights as split
from tessera.errors import ConfigError


def bounds_of(method: str, parts: int, parameters: Sequence[int], classes: Sequence[str]) -> list[int]:
    """Boundaries as split() gives them: "uniform" (layers alike), "parameters" (trained ones), or "type:REGEX" (layers
    whose class name the expression finds, whatever its letter case)."""
    wanted = method.lower()
    if wanted == "uniform":
        return split([1.0] * len(classes), parts)
    if wanted in ("parameters", "best"):
        # Layers without parameters are shared out, too, where nothing else decides.
        return split([count + 1e-6 for count in parameters], parts)
    if wanted.startswith("type:"):
        pattern = re.compile(method.split(":", 1)[1], re.IGNORECASE)
        found = [1.0 if pattern.search(name) else 0.0 for name in classes]
        if sum(found) < parts:
            raise ConfigError(
                f"[pipeline] partition_method {method!r} finds {int(sum(found))} layers for {parts} parts; the layers "
                f"are {', '.join(sorted(set(classes)))}"
            )
        return split([weight + 1e-6 for weight in found], parts)
    raise ConfigError(
        f"[pipeline] there is no partition_method {method!r}; use 'uniform', 'parameters' or 'type:REGEX'"
    )


def part_of(bounds: Sequence[int], layer: int) -> int:
    return next(part for part, (begin, end) in enumerate(pairwise(bounds)) if begin <= layer < end)
