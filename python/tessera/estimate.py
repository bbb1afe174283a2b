"""`tessera estimate`: what a rank holds of model states, from the configuration's own precision and placements.

Activations, and what torch itself takes, are not in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tessera import _core
from tessera._config import load_config
from tessera.units import UnitPolicy, default_unit_policy


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes of one rank."""

    stage: int
    params: int
    grads: int
    states: int  # masters and moments
    gathered: int  # stage 3: the two largest units, whole: one that runs and one that is fetched

    @property
    def total(self) -> int:
        return self.params + self.grads + self.states + self.gathered


def estimate(
    model: nn.Module | int, config: Any, ranks: int, stage: int | None = None, policy: UnitPolicy = default_unit_policy
) -> Estimate:
    """`model`: a module (on the meta device it takes no memory), or a number of parameters, all of them trained.
    `ranks` share the model states. `stage`: in place of the configuration's."""
    if stage is not None:
        given = config if isinstance(config, Mapping) else load_config(config).to_dict()
        section = given.get("zero_optimization") or {}
        config = {**given, "zero_optimization": {**(section if isinstance(section, Mapping) else {}), "stage": stage}}
    loaded = load_config(config)
    precision, places = _core.precision(loaded), loaded.placements
    trained, frozen, largest = _counts(model, policy)
    of_param, of_grad = precision.param.itemsize, precision.grad.itemsize
    of_states = precision.bytes_per_parameter() - of_param - of_grad

    def share(count: int, sharded: bool) -> int:
        return -(-count // ranks) if sharded else count

    chosen = loaded.get("zero_optimization.stage")
    return Estimate(
        chosen,
        share(trained + frozen, places.shards_params) * of_param,
        share(trained, chosen >= 2) * of_grad,  # stage 1: whole until the accumulation boundary
        share(trained, places.shards_states) * of_states,
        sum(largest) * of_param if places.shards_params and ranks > 1 else 0,
    )


def _counts(model: nn.Module | int, policy: UnitPolicy) -> tuple[int, int, list[int]]:
    """Elements that are trained and that are frozen, and those of the two largest units."""
    if isinstance(model, int):
        return model, 0, [0]
    units = policy(model)
    sizes: dict[str, int] = {}
    trained = frozen = 0
    for name, param in model.named_parameters():
        sizes[units.get(name, "")] = sizes.get(units.get(name, ""), 0) + param.numel()
        trained += param.numel() * param.requires_grad
        frozen += param.numel() * (not param.requires_grad)
    return trained, frozen, sorted(sizes.values())[-2:]


def model_of(path: str) -> nn.Module | int:
    """A number like 7B or 350M, or a folder or file of a Hugging Face configuration: its model without weights."""
    units = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    if path[-1:].upper() in units and path[:-1].replace(".", "", 1).isdigit():
        return int(float(path[:-1]) * units[path[-1].upper()])
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tessera estimate", description=__doc__)
    parser.add_argument(
        "model", help="a number of parameters (7B), or a folder or file of a Hugging Face configuration"
    )
    parser.add_argument("--config", help="of Tessera or DeepSpeed; default: bf16 with Adam")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    options = parser.parse_args(argv)
    config: Any = options.config or {"bf16": {"enabled": True}, "optimizer": {"type": "Adam"}}
    model = model_of(options.model)
    print(f"{'ranks':>6} {'stage':>6} {'params':>10} {'grads':>10} {'states':>10} {'gathered':>10} {'total GB':>10}")
    for ranks in options.ranks:
        for stage in range(4):
            found = estimate(model, config, ranks, stage)
            parts = (found.params, found.grads, found.states, found.gathered, found.total)
            print(f"{ranks:6} {stage:6} " + " ".join(f"{part / 1e9:10.2f}" for part in parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
