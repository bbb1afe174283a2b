"""Announces what one rank alone can find wrong to all: before anything that they do together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tessera import _core
from tessera.errors import ConfigError, IoError, UsageError

_KINDS = (ConfigError, IoError, UsageError)  # all ranks raise these where one does; other kinds are the first elsewhere


@contextlib.contextmanager
def on_all(core: _core.Engine) -> Iterator[None]:
    """Makes an error inside on one rank an error on all of them, of all engines that save together: there its own,
    elsewhere one that says it. Inside there is nothing collective but calls that fail on all ranks of this engine
    alike. Collective."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    kind = next((number for number, kind in enumerate(_KINDS) if isinstance(problem, kind)), 0)
    text = "" if problem is None else f"{kind}{str(problem) or type(problem).__name__}"
    texts = _core.checkpoint_exchange(core, text, "")
    if problem is not None:
        raise problem
    for rank, fault in enumerate(texts):
        if fault:
            raise _KINDS[int(fault[0])](f"{fault[1:]} (rank {rank})")
