"""Which train batch size lets a job run on most numbers of devices: the section `elasticity` of a configuration.

A batch fits n data-parallel ranks when it is micro_batch * accumulation * n for one of the micro-batch sizes.
Candidates are, for each micro-batch size and for their least common multiple, its largest product within
max_train_batch_size with a number of many divisors (a highly composite one). The one that fits most numbers of ranks
wins; of two that fit as many, the larger, or with prefer_larger_batch false the smaller.

Version 0.2 (the default) grows and shrinks a job by whole nodes: a node has num_gpus_per_node / model_parallel_size
ranks, its batch is max_train_batch_size / that, and min_gpus and max_gpus count the nodes that they cover whole.
Version 0.1 counts ranks one by one, whatever a node has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from tessera import _core
from tessera.errors import ConfigError

__all__ = [
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "elastic_batch",
    "with_elastic_batch",
]

_SECTION = "elasticity"
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_BY_RANKS, _BY_NODES = 0.1, 0.2  # the versions
_MOST_COMPOSITE = 720_720  # of a batch's factors; batches stay within this many micro-batches


class ElasticityError(ConfigError):
    """What an elastic configuration asks for does not exist."""


class ElasticityConfigError(ElasticityError):
    """The section itself is wrong or missing."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The batch does not fit this number of devices."""


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
    composite = highly_composite(min(most // min(micro_batches), _MOST_COMPOSITE))
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
) -> tuple[int, list[int]] | None:
    best: tuple[int, list[int]] | None = None
    for batch in _candidates(micro_batches, most):
        valid = valid_devices(batch, micro_batches, least_ranks, most_ranks)
        better = best is None or len(valid) > len(best[1]) or (len(valid) == len(best[1]) and larger)
        if valid and better:
            best = batch, valid
    return best


def elastic_batch(config: Mapping[str, Any], ranks: int | None = None) -> tuple[int, list[int], list[int]]:
    """(train batch size, numbers of data-parallel ranks that it fits, of micro_batch_sizes those that fit on `ranks` of
    them). ElasticityConfigError for a wrong section, ElasticityIncompatibleWorldSize where the batch does not fit
    `ranks`."""
    section = _section(config)
    node, ranks_of_node = _node(section)
    most = section["max_train_batch_size"] // ranks_of_node
    micro_batches = section["micro_batch_sizes"]
    if max(micro_batches) > most:
        raise ElasticityConfigError(
            f"[elasticity] micro_batch_sizes {micro_batches}: must be at most {most}, max_train_batch_size / "
            f"{ranks_of_node} ranks of a node"
        )
    least_gpus, most_gpus = section["min_gpus"], section["max_gpus"]
    best = _best(
        sorted(set(micro_batches)), most, max(1, least_gpus // node), most_gpus // node, section["prefer_larger_batch"]
    )
    if best is None:
        raise ElasticityError(
            f"[elasticity] no batch of at most {most * ranks_of_node} samples in micro-batches of {micro_batches} fits "
            f"min_gpus {least_gpus} to max_gpus {most_gpus} devices, in nodes of {node}"
        )
    batch, valid = best[0] * ranks_of_node, [number * ranks_of_node for number in best[1]]
    if ranks is None:
        return batch, valid, []
    if ranks not in valid:
        raise ElasticityIncompatibleWorldSize(
            f"[elasticity] {ranks} data-parallel ranks do not fit the batch of {batch} samples; these do: {valid}"
        )
    return batch, valid, [micro for micro in micro_batches if batch % (micro * ranks) == 0]


def _node(section: Mapping[str, Any]) -> tuple[int, int]:
    """By how many devices a job grows, and how many data-parallel ranks these are."""
    if section["version"] == _BY_RANKS:
        return 1, 1
    return section["num_gpus_per_node"], section["num_gpus_per_node"] // section["model_parallel_size"]


def with_elastic_batch(config: _core.Config, ranks: int) -> _core.Config:
    """The configuration with the batch that its section elasticity chooses for so many data-parallel ranks; itself
    where the section is off. Errors as elastic_batch()."""
    tree = config.to_dict()
    section = tree[_SECTION]
    if not section["enabled"]:
        return config
    asked = {_SECTION: section, **{key: tree[key] for key in _BATCH if tree[key] is not None}}
    batch, _, fitting = elastic_batch(asked, ranks)
    return config.with_batch(batch, max(fitting))


def _section(config: Mapping[str, Any]) -> dict[str, Any]:
    if _SECTION not in config:
        raise ElasticityConfigError("[elasticity] the configuration has no section elasticity")
    try:
        section: dict[str, Any] = _core.Config.from_dict({_SECTION: dict(config[_SECTION])}).to_dict()[_SECTION]
    except ConfigError as error:
        raise ElasticityConfigError(str(error)) from None
    wrong = []
    if not section["enabled"]:
        wrong.append("enabled is false")
    if not section["micro_batch_sizes"]:
        wrong.append("micro_batch_sizes is empty")
    if section["min_gpus"] > section["max_gpus"]:
        wrong.append(f"min_gpus {section['min_gpus']} is larger than max_gpus {section['max_gpus']}")
    wrong += _wrong_node(section)
    given = [key for key in _BATCH if key in config]
    if given and not section["ignore_non_elastic_batch_info"]:
        wrong.append(f"{', '.join(given)} beside it: leave it out, or set ignore_non_elastic_batch_info")
    if wrong:
        raise ElasticityConfigError("[elasticity] " + "; ".join(wrong))
    return section


def _wrong_node(section: Mapping[str, Any]) -> list[str]:
    version, node, model = section["version"], section["num_gpus_per_node"], section["model_parallel_size"]
    if version not in (_BY_RANKS, _BY_NODES):
        return [f"version {version} is not known; must be {_BY_RANKS} or {_BY_NODES}"]
    if version == _BY_RANKS:
        return [f"model_parallel_size {model} needs version {_BY_NODES}"] if model > 1 else []
    if node % model:
        return [f"model_parallel_size {model} does not divide num_gpus_per_node {node}"]
    if section["max_gpus"] < node:
        return [f"max_gpus {section['max_gpus']} is less than a node, num_gpus_per_node {node}"]
    return []
