from __future__ import annotations

import gc
from collections.abc import Iterable

from contenders import Contender

AUTOGRAD = "autograd alone"


def close(entries: list[Contender]) -> None:
    for entry in entries:
        entry.close()
    entries.clear()
    gc.collect()


def base_of(names: Iterable[str]) -> str:
    """What engines are compared with: the bare loop where it does the same work (one rank), else DDP."""
    known = list(names)
    return next(name for name in ("bare loop", "DDP", *known) if name in known)
