"""Partitioned parameters for users: regions in which they are whole, parameters used by other modules, leaf modules,
and construction of models that do not fit one rank."""

from __future__ import annotations

from tessera._former import former_names
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

__getattr__ = former_names(
    __name__,
    {
        **{f"{verb}_z3_leaf_modules": f"{verb}_leaf_modules" for verb in ("get", "set", "unset")},
        **{f"set_z3_leaf_{what}": f"set_leaf_{what}" for what in ("module", "modules_by_name", "modules_by_suffix")},
        **{f"z3_leaf_{what}": f"is_leaf_{what}" for what in ("module", "parameter")},
    },
    globals(),
)
