"""The part of partitioned parameters for other packages, beside what users have in tessera.zero: who holds a parameter,
the hooks of an engine's modules, regions, what zero.Init has made."""

from __future__ import annotations

from tessera.zero._hooks import Partition
from tessera.zero._init import early_of, partition_again, suspended, taken_over, whole_for_good
from tessera.zero._owners import Mark, engine_of, holder_of
from tessera.zero._regions import Region, parts_of

__all__ = [
    "Mark",
    "Partition",
    "Region",
    "early_of",
    "engine_of",
    "holder_of",
    "partition_again",
    "parts_of",
    "suspended",
    "taken_over",
    "whole_for_good",
]
