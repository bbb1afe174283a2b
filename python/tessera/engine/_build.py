"""What the core of an engine is built of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tessera import _core
from tessera._loans import Loans
from tessera.autocast import PARAM_COMM_DTYPE_ATTR_NAME, get_comm_dtype, has_comm_dtype, init_autocast_params
from tessera.engine._ranks import Ranks
from tessera.engine._updates import Updates
from tessera.optim.engines import (
    ExternalRunner,
    NativeRule,
    NativeRunner,
    Runner,
    SlicesRunner,
    WholeOptimizer,
    describe,
    params_of,
    read_group,
)
from tessera.parallel.engines import TensorParallel
from tessera.units import ROOT, UnitPolicy, outline
from tessera.zero.engines import early_of
from tessera.zero.leaf import LEAF_MARK, apply_config, is_leaf_module, leaf_paths

Base = torch.optim.Optimizer | None


def options_of(settings: _core.Config, base: Base, rule: NativeRule | None, ranks: Ranks) -> _core.EngineOptions:
    options = _core.engine_options(settings, ranks.dp_world_size)
    options.rule = rule.rule if rule is not None else _core.Rule.External
    if base is not None and rule is None:
        options.client_optimizer = describe(base)
    return options


def group_options(base: Base, rule: NativeRule | None) -> list[_core.GroupOptions]:
    groups = [_core.GroupOptions() for _ in base.param_groups] if base is not None else []
    if base is not None and rule is not None:
        for number, group in enumerate(groups):
            read_group(rule, base, number, group)
    return groups


def mark_dtypes(model: nn.Module, settings: _core.Config, options: _core.EngineOptions, loans: Loans) -> None:
    """Marks, under torch_autocast, each parameter with the dtype in which its gradients travel."""
    if options.autocast.enabled:
        modules = settings.torch_autocast.lower_precision_safe_modules
        with loans.watching(model.parameters(), PARAM_COMM_DTYPE_ATTR_NAME):
            init_autocast_params(model, options.autocast.dtype, modules)


def units_of(
    model: nn.Module, settings: _core.Config, policy: UnitPolicy, loans: Loans
) -> tuple[dict[str, str], list[str]]:
    """The unit of each parameter, and warnings."""
    units = policy(model)
    if not settings.placements.shards_params:
        return units, []
    with loans.watching(model.modules(), LEAF_MARK):
        warnings = apply_config(model, settings)
    for module in model.modules():
        if is_leaf_module(module):
            for param in module.parameters():
                loans.put(param, LEAF_MARK, True)
    return _core.partition_units(outline(model), units, leaf_paths(model)), warnings


@dataclass(frozen=True)
class Specs:
    params: list[_core.ParamSpec]  # all parameters; those that the optimizer has and the model lacks come last
    group_names: list[list[tuple[str, bool]]]  # Updates.group_names


def specs_of(
    model: nn.Module, base: Base, units: dict[str, str], marked: bool, parallel: TensorParallel, joins: dict[int, int]
) -> Specs:
    """`marked`: mark_dtypes() has marked them; `joins`: of groups_of_frozen()."""
    groups = base.param_groups if base is not None else []
    group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"] if p.requires_grad}
    named: list[tuple[str, torch.Tensor]] = list(model.named_parameters())
    known = {id(param) for _, param in named}
    strangers = [param for param in params_of(groups) if id(param) not in known]
    named += [(f"optimizer.{number}", param) for number, param in enumerate(strangers)]
    names = {id(param): name for name, param in named}
    specs = [
        _core.ParamSpec(
            name,
            param,
            group_of.get(id(param), -1),
            units.get(name, ROOT),
            *early_of(param),
            get_comm_dtype(param) if marked and has_comm_dtype(param) else None,
            *parallel.spec_of(param),
            joins=joins.get(id(param), -1),
        )
        for name, param in named
    ]
    return Specs(specs, [[(names[id(p)], p.requires_grad) for p in group["params"]] for group in groups])


def updates_of(core: _core.Engine, specs: Specs, settings: _core.Config, ranks: Ranks) -> Updates:
    """The updates, still without a runner."""
    shards = settings.placements.shards_states
    return Updates(
        core,
        runner=None,
        index={id(spec.tensor): number for number, spec in enumerate(specs.params)},
        optimized=frozenset(number for number, spec in enumerate(specs.params) if spec.group >= 0),
        group_names=specs.group_names,
        params_are_masters=not shards and core.options().zero.precision.master_is_param(),
        cuts_states=shards and ranks.seq_dp_world_size > 1,
    )


def runner_of(updates: Updates, base: Base, rule: NativeRule | None) -> Runner | None:
    index = {key: number for key, number in updates.index.items() if number in updates.optimized}
    if base is None:
        return None
    if rule is not None:
        return NativeRunner(updates.core, base, rule, index)
    if isinstance(base, WholeOptimizer):
        return SlicesRunner(updates.core, base, index, updates.params_are_masters)
    return ExternalRunner(updates.core, base, index, on_params=updates.params_are_masters)
