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
    if isinstance(model, int):
        return _core.sizes_of(model, config)
    units = policy(model)
    named = model.named_parameters()
    params = [(name, units.get(name, ""), param.numel(), param.requires_grad) for name, param in named]
    return _core.sizes_of(params, plan_for(model, config).core if mesh_sizes(config)["tp"] > 1 else None)


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
