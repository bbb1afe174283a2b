from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping

from measure import Times
from report import table
from trainers import Spec, Trainer, parse

AUTOGRAD = "autograd alone"


def close(entries: list[Trainer]) -> None:
    for entry in entries:
        entry.close()
    entries.clear()
    gc.collect()


def base_of(names: Iterable[str]) -> str:
    """What engines are compared with: the bare loop where it does the same work (one rank), else DDP."""
    known = list(names)
    return next(name for name in ("bare loop", "DDP", *known) if name in known)


def own_specs(peers: Iterable[str]) -> dict[str, Spec]:
    """The named trainers that are Tessera's, by the name in tables."""
    specs = [parse(peer) for peer in peers]
    return {spec.label: spec for spec in specs if spec.kind == "tessera"}


def starts(times: Mapping[str, Times]) -> str:
    """Construction and first step, once each."""
    rows = [
        [name, f"{t.construction * 1e3:.0f}", f"{t.first_step * 1e3:.0f}"]
        for name, t in times.items()
        if name != AUTOGRAD
    ]
    return "Once, libraries imported before:\n\n" + table(["engine", "construction, ms", "first step, ms"], rows)
