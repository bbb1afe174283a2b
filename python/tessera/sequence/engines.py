"""The part of sequences that ranks share for engines, beside what users have in tessera.sequence."""

from __future__ import annotations

from tessera.sequence._huggingface import attends_locally

__all__ = ["attends_locally"]
