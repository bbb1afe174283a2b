"""Tessera under the name `deepspeed`. Names are resolved by the table in _table.py when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed import _lazy
from deepspeed._guard import refuse_beside_deepspeed

refuse_beside_deepspeed(__file__)
_lazy.install()

__version__ = version = "0.19.8+tessera.0.1.0"
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
__git_hash__ = __git_branch__ = None

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        value = _lazy.attribute(__name__, name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_lazy.names_of(__name__)})
