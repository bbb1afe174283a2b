"""The engine: an nn.Module around the user's model, what builds one, and what it shows of its optimizer and scale."""

from __future__ import annotations

from tessera.engine._engine import Engine
from tessera.engine._initialize import initialize
from tessera.engine._optimizer import Optimizer
from tessera.engine._scaler import LossScaler

__all__ = ["Engine", "LossScaler", "Optimizer", "initialize"]
