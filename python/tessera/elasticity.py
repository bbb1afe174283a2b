"""Which train batch size lets a job run on most numbers of devices: the section `elasticity` of a configuration.

A batch fits n devices when it is micro_batch * accumulation * n for one of the micro-batch sizes. Candidates are, for
each micro-batch size and for their least common multiple, its largest product within max_train_batch_size with a number
of many divisors (a highly composite one). The one that fits most numbers of devices wins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from tessera import _core
from tessera.errors import ConfigError

_SECTION = "elasticity"
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_LARGEST_VERSION = 0.2


class ElasticityError(ConfigError):
    """What an elastic configuration asks for does not exist."""


class ElasticityConfigError(ElasticityError):
    """The section itself is wrong or missing."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The batch does not fit this number of devices."""


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """`elasticity.enabled` of a configuration."""
    return bool((ds_config.get(_SECTION) or {}).get("enabled", False))


def highly_composite(limit: int) -> list[int]:
    """The numbers up to `limit` that have more divisors than every smaller one, ascending."""
    found, best = [], 0
    for number in _smooth(limit):
        divisors = _divisors(number)
        if divisors > best:
            found.append(number)
            best = divisors
    return found


def _smooth(limit: int) -> list[int]:
    """Products of the first primes with exponents that do not rise, the only ones that can be highly composite."""
    found = [1]

    def extend(number: int, primes: tuple[int, ...], most: int) -> None:
        if not primes:
            return
        for _ in range(most):
            number *= primes[0]
            if number > limit:
                return
            found.append(number)
            most_left = _exponent(number, primes[0])
            extend(number, primes[1:], most_left)

    extend(1, (2, 3, 5, 7, 11, 13, 17, 19, 23), 64)
    return sorted(found)


def _exponent(number: int, prime: int) -> int:
    count = 0
    while number % prime == 0:
        number, count = number // prime, count + 1
    return count


def _divisors(number: int) -> int:
    count, rest = 1, number
    for prime in itertools.chain([2], range(3, math.isqrt(number) + 2, 2)):
        power = _exponent(rest, prime)
        count, rest = count * (power + 1), rest // prime**power
    return count * (2 if rest > 1 else 1)


def _candidates(micro_batches: list[int], most: int) -> list[int]:
    composite = highly_composite(max(1, most // min(micro_batches)))
    found = set()
    for base in [*micro_batches, math.lcm(*micro_batches)]:
        fitting = [number for number in composite if base * number <= most]
        if fitting:
            found.add(base * fitting[-1])
    return sorted(found)


def valid_devices(batch: int, micro_batches: list[int], least: int, most: int) -> list[int]:
    """The numbers of data-parallel ranks, from `least` to `most`, that `batch` can be divided over."""
    found: set[int] = set()
    for micro in micro_batches:
        if batch % micro:
            continue
        products = batch // micro  # ranks * accumulation
        found.update(n for n in range(least, min(most, products) + 1) if products % n == 0)
    return sorted(found)


def _best(
    micro_batches: list[int], most: int, least_ranks: int, most_ranks: int, larger: bool
) -> tuple[int, list[int]]:
    best: tuple[int, list[int]] | None = None
    for batch in _candidates(micro_batches, most):
        valid = valid_devices(batch, micro_batches, least_ranks, most_ranks)
        better = best is None or len(valid) > len(best[1]) or (len(valid) == len(best[1]) and larger)
        if valid and better:
            best = batch, valid
    if best is None:
        raise ElasticityError(
            f"[elasticity] no batch of at most {most} samples in micro-batches of {micro_batches} fits "
            f"{least_ranks} to {most_ranks} devices"
        )
    return best


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str | None = None,
    world_size: int = 0,
    return_microbatch: bool = False,
) -> Any:
    """(train batch size, numbers of devices that it fits); with a `world_size` (> 0), or `return_microbatch`, also the
    micro-batch size there. Depends on nothing but its arguments, so that a scheduler may call it, too.

    `target_deepspeed_version` is accepted and changes nothing. ElasticityConfigError for a wrong section,
    ElasticityIncompatibleWorldSize where the batch does not fit `world_size`."""
    section = _section(ds_config)
    micro_batches = sorted(set(section["micro_batch_sizes"]))
    model, node = section["model_parallel_size"], section["num_gpus_per_node"]
    in_nodes = model > 1
    if in_nodes and node % model:
        raise ElasticityConfigError(
            f"[elasticity] model_parallel_size {model} does not divide num_gpus_per_node {node}"
        )
    # With slices of a model, ranks come and go by whole nodes.
    per_node = node // model if in_nodes else 1
    least = -(-section["min_gpus"] // node) if in_nodes else section["min_gpus"]
    most = section["max_gpus"] // node if in_nodes else section["max_gpus"]
    batch, valid = _best(
        micro_batches, section["max_train_batch_size"] // per_node, least, most, section["prefer_larger_batch"]
    )
    batch, valid = batch * per_node, [number * (node if in_nodes else 1) for number in valid]
    if world_size <= 0:
        if return_microbatch:
            raise ElasticityConfigError("[elasticity] the micro-batch size depends on world_size: give it")
        return batch, valid
    if world_size not in valid:
        raise ElasticityIncompatibleWorldSize(
            f"[elasticity] {world_size} devices do not fit the batch of {batch} samples; these do: {valid}"
        )
    ranks = world_size // model
    fitting = [micro for micro in micro_batches if batch % (micro * ranks) == 0]
    return batch, valid, (fitting[-1] if section["prefer_larger_batch"] else fitting[0])


def with_elastic_batch(config: _core.Config, ranks: int) -> _core.Config:
    """The configuration with the batch that its section elasticity chooses for so many data-parallel ranks, which stand
    for model_parallel_size devices each; itself where the section is off. Errors as compute_elastic_config()."""
    tree = config.to_dict()
    section = tree[_SECTION]
    if not section["enabled"]:
        return config
    asked = {_SECTION: section, **{key: tree[key] for key in _BATCH if tree[key] is not None}}
    batch, _, micro = compute_elastic_config(asked, world_size=ranks * section["model_parallel_size"])
    return config.with_batch(batch, micro)


def _section(config: Mapping[str, Any]) -> dict[str, Any]:
    if _SECTION not in config:
        raise ElasticityConfigError("[elasticity] the configuration has no section elasticity")
    try:
        section: dict[str, Any] = _core.Config.from_dict({_SECTION: dict(config[_SECTION])}).to_dict()[_SECTION]
    except ValueError as error:
        raise ElasticityConfigError(str(error)) from None
    wrong = []
    if not section["enabled"]:
        wrong.append("enabled is false")
    if not section["micro_batch_sizes"]:
        wrong.append("micro_batch_sizes is empty")
    if section["min_gpus"] > section["max_gpus"]:
        wrong.append(f"min_gpus {section['min_gpus']} is larger than max_gpus {section['max_gpus']}")
    if section["version"] > _LARGEST_VERSION:
        wrong.append(f"version {section['version']} is not known; the newest is {_LARGEST_VERSION}")
    given = [key for key in _BATCH if key in config]
    if given and not section["ignore_non_elastic_batch_info"]:
        wrong.append(f"{', '.join(given)} beside it: leave it out, or set ignore_non_elastic_batch_info")
    if wrong:
        raise ElasticityConfigError("[elasticity] " + "; ".join(wrong))
    return section
