"""Elastic batches: the pure function, checked against all batches and all numbers of devices."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import engines, make
from tessera.elasticity import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    elastic_batch,
    highly_composite,
    valid_devices,
)

from tessera import ConfigError


def section(**more: Any) -> dict[str, Any]:
    return {"elasticity": {"enabled": True, "max_train_batch_size": 1000, "micro_batch_sizes": [2, 4, 6], **more}}


def test_highly_composite_numbers() -> None:
    by_hand, most = [], 0
    for number in range(1, 5041):
        divisors = sum(number % d == 0 for d in range(1, number + 1)) if number < 400 else None
        if divisors is None:
            break
        if divisors > most:
            by_hand.append(number)
            most = divisors
    assert highly_composite(399) == by_hand
    assert highly_composite(5040)[-3:] == [1680, 2520, 5040]


def test_devices_that_a_batch_fits() -> None:
    assert valid_devices(24, [4, 6], 1, 100) == [1, 2, 3, 4, 6]
    assert valid_devices(24, [4, 6], 3, 5) == [3, 4]
    assert valid_devices(25, [4, 6], 1, 100) == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(9, 300),
    st.integers(1, 4),
    st.integers(4, 40),
    st.booleans(),
)
def test_every_number_of_devices_that_is_promised_works(
    micro: list[int], most: int, least: int, largest: int, larger: bool
) -> None:
    config = section(
        micro_batch_sizes=micro, max_train_batch_size=most, min_gpus=least, max_gpus=largest, prefer_larger_batch=larger
    )
    try:
        batch, valid, _ = elastic_batch(config)
    except ElasticityError:
        return
    assert 0 < batch <= most and valid and all(least <= n <= largest for n in valid)
    for world in range(1, largest + 2):
        if world in valid:
            again, _, sizes = elastic_batch(config, world)
            assert again == batch and sizes and {*sizes} <= {*micro}
            assert all(batch % (size * world) == 0 for size in sizes)
        else:
            with pytest.raises(ElasticityIncompatibleWorldSize):
                elastic_batch(config, world)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "no section"),
        (section(enabled=False), "enabled is false"),
        (section(version=0.9), "version 0.9 is not known"),
        (section(version=0.1, model_parallel_size=2), "model_parallel_size 2 needs version 0.2"),
        (section(model_parallel_size=3, num_gpus_per_node=4), "3 does not divide num_gpus_per_node 4"),
        (section(num_gpus_per_node=8, max_gpus=4), "max_gpus 4 is less than a node"),
        (section(micro_batch_sizes=[2, 5], max_train_batch_size=4, version=0.1), "must be at most"),
        (section(num_gpus_per_node=8, max_train_batch_size=47), "must be at most"),
        (section(min_gpus=9, max_gpus=3), "min_gpus 9 is larger"),
        (section(micro_batch_sizes=[0]), "micro_batch_sizes: must be"),
        ({**section(), "train_batch_size": 8}, "train_batch_size beside it"),
        ({**section(), "gradient_accumulation_steps": 8}, "gradient_accumulation_steps beside it"),
        (section(nonsense=1), "nonsense"),
    ],
)
def test_wrong_sections(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ElasticityConfigError, match=says) as error:
        elastic_batch(config)
    assert isinstance(error.value, ConfigError)


def engine_of(world: int, **more: Any) -> list[tuple[int, int, int]]:
    cfg = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **section(**more.pop("section", {})), **more}
    return engines(make(), world, cfg, lambda engine, rank: engine.get_batch_info())


def test_an_engine_takes_the_batch_of_its_world() -> None:
    batches = set()
    for world in (1, 2, 3):
        batch, _, sizes = elastic_batch(section(), world)
        for info in engine_of(world):
            assert info == (batch, max(sizes), batch // (max(sizes) * world))
        batches.add(batch)
    assert len(batches) == 1
    ignoring = {"ignore_non_elastic_batch_info": True}
    assert engine_of(1, section=ignoring, train_batch_size=7) == engine_of(1)
    with pytest.raises(ElasticityConfigError, match=r"gradient_accumulation_steps beside it"):
        engine_of(1, gradient_accumulation_steps=2)
    with pytest.raises(ElasticityIncompatibleWorldSize, match=r"2 data-parallel ranks do not fit"):
        engine_of(2, section={"max_gpus": 1})
