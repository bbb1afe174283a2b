"""Partitioned parameters for users: regions in which they are whole, parameters used by other modules, leaf modules,
and construction of models that do not fit one rank."""

from __future__ import annotations

from tessera.zero import leaf
from tessera.zero._hooks import register_external_parameter, unregister_external_parameter
from tessera.zero._init import Init
from tessera.zero._owners import ParamStatus, PartitionInfo, partition_info
from tessera.zero._regions import GatheredParameters
from tessera.zero.leaf import *  # noqa: F403

__all__ = [
    *leaf.__all__,
    "GatheredParameters",
    "Init",
    "ParamStatus",
    "PartitionInfo",
    "partition_info",
    "register_external_parameter",
    "unregister_external_parameter",
]
