"""The engine: an nn.Module around the user's model, and what builds one."""

from __future__ import annotations

from tessera.engine._engine import Engine
from tessera.engine._initialize import initialize

__all__ = ["Engine", "initialize"]
