"""Which layers a part of a pipeline has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from tessera.errors import ConfigError


def split(weights: Sequence[float], parts: int) -> list[int]:
    """Boundaries [0, ..., len(weights)] of `parts` runs of neighbours, of which the heaviest is as light as can be; of
    two such cuts the one whose later parts are fuller. No part is empty."""
    count = len(weights)
    if count < parts:
        raise ConfigError(f"[pipeline] {count} layers cannot be cut into {parts} parts; use fewer stages or chunks")
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # best[i]: the least possible heaviest part of the first i layers in the parts so far.
    best = [float("inf"), *sums[1:]]
    cuts: list[list[int]] = []
    for part in range(2, parts + 1):
        now, cut = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(part, count + 1):
            for begin in range(part - 1, end):
                heaviest = max(best[begin], sums[end] - sums[begin])
                if heaviest < now[end]:
                    now[end], cut[end] = heaviest, begin
        best = now
        cuts.append(cut)
    bounds = [count]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return [0, *reversed(bounds)]


def bounds_of(method: str, parts: int, parameters: Sequence[int], classes: Sequence[str]) -> list[int]:
    """As split(): "uniform" (layers alike), "parameters" (trained ones), or "type:REGEX" (layers whose class name the
    expression finds, whatever its letter case)."""
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
