"""What an engine needs of sequences that ranks share, beside what users have in tessera.sequence."""

from __future__ import annotations

from tessera.sequence._huggingface import attends_locally

__all__ = ["attends_locally"]
