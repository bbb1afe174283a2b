"""The engine: an nn.Module around the user's model, and what builds one."""

from __future__ import annotations

from tessera.engine._engine import Engine
from tessera.engine._forward import cast_inputs
from tessera.engine._initialize import initialize
from tessera.engine._together import step_together

__all__ = ["Engine", "cast_inputs", "initialize", "step_together"]
