"""Estimates what a rank holds of model states, from the configuration's own precision and placements, with the device
of the model apart from the host (tessera/config/estimate.h). Activations, and what torch itself takes, are not in it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache

import torch
from torch import nn

from tessera import _core
from tessera._command import run
from tessera._config import ConfigLike, load_config
from tessera._mesh import mesh_sizes
from tessera.parallel import plan_for
from tessera.units import UnitPolicy, default_unit_policy

__all__ = ["Estimate", "estimate", "main"]

Estimate = (
    _core.Estimate
)  # bytes of one rank: params, grads, states, gathered and their total on the device; host, disk


def estimate(
    model: nn.Module | int,
    config: ConfigLike,
    ranks: int,
    stage: int | None = None,
    policy: UnitPolicy = default_unit_policy,
) -> Estimate:
    """`model`: a module (on the meta device it takes no memory), or a number of parameters, all of them trained.
    `ranks`: all of the job, of which the configuration makes tensor-parallel, sequence-parallel and shard groups.
    `stage`: in place of the configuration's. Settings found on the device ("auto") count as if all states were away
    and the host updated them. ConfigError where stage and configuration, or the ranks, do not go together."""
    loaded = load_config(config)
    if stage is not None:
        loaded = _core.with_stage(loaded, stage)
    return _core.estimate(_sizes(model, loaded, policy), loaded, ranks)


def _sizes(model: nn.Module | int, config: _core.Config, policy: UnitPolicy = default_unit_policy) -> _core.ModelSizes:
    """Sizes of a tensor-parallel rank's slice of the model."""
    tp = mesh_sizes(config)["tp"]
    if isinstance(model, int):
        return _core.ModelSizes(-(-model // tp))
    units = policy(model)
    cut = _slices(model, config) if tp > 1 else {}
    sizes: dict[str, int] = {}
    trained = frozen = 0
    for name, param in model.named_parameters():
        most, whole = cut.get(name, (1, 1))
        count = param.numel() * most // whole
        sizes[units.get(name, "")] = sizes.get(units.get(name, ""), 0) + count
        trained += count * param.requires_grad
        frozen += count * (not param.requires_grad)
    return _core.ModelSizes(trained, frozen, list(sizes.values()))


def _slices(model: nn.Module, config: _core.Config) -> dict[str, tuple[int, int]]:
    """Parameters that tensor parallelism cuts: the longest slice, of how much."""
    found = {}
    for cut in plan_for(model, config).core.decisions:
        if cut.partition == _core.Partition.Skip:
            continue
        part = max(cut.sizes), cut.total
        found[f"{cut.path}.{cut.param}"] = part
        if cut.partition == _core.Partition.Column:
            found[f"{cut.path}.bias"] = part
    return found


def _model_of(path: str) -> nn.Module:
    """The model of a folder or file of a Hugging Face configuration, without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))


def main(argv: Sequence[str] | None = None) -> int:
    """`tessera estimate`."""
    made = cache(_model_of)
    given = sys.argv[1:] if argv is None else argv
    return run(["estimate", *given], sizes_of=lambda path, config: _sizes(made(path), config))


if __name__ == "__main__":
    sys.exit(main())
