"""`tessera estimate`: what a rank holds of model states, from the configuration's own precision and placements, with
the device of the model apart from the host.

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
from tessera._mesh import mesh_sizes
from tessera.parallel import plan_for
from tessera.units import UnitPolicy, default_unit_policy

__all__ = ["Estimate", "estimate", "main"]

_TILE = 1 << 22  # elements of an update on the host, of which three are under way


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes of one rank: the first four on the device, and with offload those in host memory and on the disk."""

    stage: int
    params: int
    grads: int  # at the end of a backward; none while a forward runs
    states: int  # masters and moments
    gathered: int  # stage 3: the two largest units, whole: one that runs and one that is fetched
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """On the device."""
        return self.params + self.grads + self.states + self.gathered


@dataclasses.dataclass(frozen=True)
class _Counts:
    """Elements of a tensor-parallel rank's slice of the model."""

    trained: int
    frozen: int
    largest: tuple[int, ...]  # units, the two largest


def estimate(
    model: nn.Module | int, config: Any, ranks: int, stage: int | None = None, policy: UnitPolicy = default_unit_policy
) -> Estimate:
    """`model`: a module (on the meta device it takes no memory), or a number of parameters, all of them trained.
    `ranks`: all of the job, of which the configuration makes tensor-parallel, sequence-parallel and shard groups.
    `stage`: in place of the configuration's. What is found on the device ("auto") counts as if all states were away
    and the host updated them. ConfigError where the two, or the ranks, do not go together."""
    if stage is not None:
        given = config if isinstance(config, Mapping) else load_config(config).to_dict()
        section = given.get("zero_optimization") or {}
        config = {**given, "zero_optimization": {**(section if isinstance(section, Mapping) else {}), "stage": stage}}
    loaded = load_config(config)
    precision, places = _core.precision(loaded), loaded.placements
    sizes = mesh_sizes(loaded)
    mesh = _core.mesh_shape(ranks, **sizes)
    sharing = mesh.size(_core.Axis.DpShard) * mesh.size(_core.Axis.Sp)
    counts = _counts(model, loaded, sizes["tp"], policy)
    of_param, of_grad = precision.param.itemsize, precision.grad.itemsize
    of_states = precision.bytes_per_parameter() - of_param - of_grad

    def share(count: int, sharded: bool) -> int:
        return -(-count // sharing) if sharded else count

    zero = loaded.zero_optimization
    slices = sharing > 1 or zero.offload_param.device != "none"  # offload partitions for one rank, too
    found = Estimate(
        zero.stage,
        share(counts.trained + counts.frozen, places.shards_params) * of_param,
        share(counts.trained, _passes(loaded)) * of_grad,
        share(counts.trained, places.shards_states) * of_states,
        sum(counts.largest) * of_param if places.shards_params and slices else 0,
    )
    found = _states_away(found, loaded, counts, share(counts.trained, True), of_states, of_grad)
    return _params_away(found, loaded, of_param)


def _passes(config: _core.Config) -> bool:
    """Gradients are reduced in the backward that makes them; else they are whole until the accumulation boundary."""
    places = config.placements
    return bool(places.reduces_every_backward or (places.shards_states and not _accumulates(config)))


def _accumulates(config: _core.Config) -> bool:
    steps = config.gradient_accumulation_steps or (2 if config.train_batch_size else 1)
    return bool(steps > 1 or not config.managed_gradient_accumulation)


_NARROW = 6  # bytes a parameter of a residual and two moments of 16 bits


def _states_away(
    found: Estimate, config: _core.Config, counts: _Counts, own: int, of_states: int, of_grad: int
) -> Estimate:
    """With offload_optimizer. `own`: elements that this rank updates."""
    home = config.zero_optimization.offload_optimizer.device
    if home == "none":
        return found
    ratio, through = config.zero_optimization.offload_optimizer.ratio, config.tessera.device_share
    away = int(own * (1 if ratio == "auto" else ratio))
    tiles = min(away, 3 * _TILE) * of_states if home == "nvme" else 0
    # The device updates states of 16 bits and a share of others; gradients stay with it where one backward makes them.
    through = 1 if of_states <= _NARROW else 0 if through == "auto" else through
    leave = away if _accumulates(config) else away - int(away * through)
    return dataclasses.replace(
        found,
        # Two buckets of a unit's gradients go through, and the rest stays. Stage 1 adds up on the device instead.
        grads=min(found.grads, (own - leave + sum(counts.largest)) * of_grad) if _passes(config) else found.grads,
        states=found.states - away * of_states,
        host=found.host + leave * of_grad + (away * of_states if home == "cpu" else tiles),
        disk=found.disk + (away * of_states if home == "nvme" else 0),
    )


def _params_away(found: Estimate, config: _core.Config, of_param: int) -> Estimate:
    """With offload_param, which is for partitioned parameters only."""
    home = config.zero_optimization.offload_param.device
    if home == "none" or not config.placements.shards_params:
        return found
    kept = found.params
    if home == "nvme":  # the first units stay in host memory, the others pass in tiles
        first = min(found.params, config.zero_optimization.offload_param.max_in_cpu * of_param)
        kept = first + min(found.params - first, 3 * _TILE * of_param)
        found = dataclasses.replace(found, disk=found.disk + found.params - first)
    return dataclasses.replace(found, params=0, host=found.host + kept)


def _counts(model: nn.Module | int, config: _core.Config, tp: int, policy: UnitPolicy) -> _Counts:
    if isinstance(model, int):
        return _Counts(-(-model // tp), 0, (0,))
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
    return _Counts(trained, frozen, tuple(sorted(sizes.values())[-2:]))


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
    loaded = load_config(config)
    model = model_of(options.model)
    columns = ["params", "grads", "states", "gathered", "total"]
    zero = loaded.zero_optimization
    if any(home.device != "none" for home in (zero.offload_optimizer, zero.offload_param)):
        columns += ["host", "disk"]
    print(f"{'ranks':>6} {'stage':>6} " + " ".join(f"{name:>10}" for name in columns) + "  (GB)")
    shown = 0
    for ranks in options.ranks:
        for stage in range(4):
            try:
                found = estimate(model, config, ranks, stage)
            except (ValueError, NotImplementedError) as error:
                print(f"{ranks:6} {stage:6} refused: {_reason(error)}")
                continue
            shown += 1
            print(f"{ranks:6} {stage:6} " + " ".join(f"{getattr(found, name) / 1e9:10.2f}" for name in columns))
    return 0 if shown else 1


def _reason(error: Exception) -> str:
    """A list of problems as one line, without its head."""
    head, *lines = str(error).splitlines()
    return "; ".join(line.strip() for line in lines) or head


if __name__ == "__main__":
    sys.exit(main())
