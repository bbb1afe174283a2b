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
    compute_elastic_config,
    elasticity_enabled,
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
        batch, valid = compute_elastic_config(config)
    except ElasticityError:
        return
    assert 0 < batch <= most and valid and all(least <= n <= largest for n in valid)
    for world in range(1, largest + 2):
        if world in valid:
            again, _, size = compute_elastic_config(config, world_size=world)
            assert again == batch and size in micro and batch % (size * world) == 0
        else:
            with pytest.raises(ElasticityIncompatibleWorldSize):
                compute_elastic_config(config, world_size=world)


def test_the_batch_that_deepspeed_chooses() -> None:
    many = section(max_train_batch_size=10_000, micro_batch_sizes=[8, 12, 16, 17], min_gpus=32, max_gpus=1500)
    batch, valid, micro = compute_elastic_config(many, world_size=64)
    assert (batch, len(valid), micro) == (9792, 23, 17)


NODES = {"num_gpus_per_node": 8, "max_gpus": 64}
# Of DeepSpeed 0.19.6, measured: keys, world_size, batch, the first and the last two numbers of ranks, micro-batch.
ANSWERS: list[tuple[dict[str, Any], int, tuple[int, list[int], int]]] = [
    ({}, 8, (1680, [1, 2, 420, 840], 6)),
    ({"version": 0.1}, 8, (1680, [1, 2, 420, 840], 6)),
    ({"version": 0.1, "prefer_larger_batch": False}, 4, (1680, [1, 2, 420, 840], 6)),
    ({"prefer_larger_batch": False}, 4, (1680, [1, 2, 420, 840], 6)),
    (NODES, 8, (1920, [8, 16, 48, 64], 6)),
    ({**NODES, "min_gpus": 8}, 16, (1920, [8, 16, 48, 64], 6)),
    ({**NODES, "min_gpus": 12}, 8, (1920, [8, 16, 48, 64], 6)),
    ({**NODES, "min_gpus": 8, "prefer_larger_batch": False}, 16, (1920, [8, 16, 48, 64], 6)),
    ({**NODES, "min_gpus": 8, "model_parallel_size": 2}, 16, (1920, [4, 8, 24, 32], 6)),
    ({**NODES, "model_parallel_size": 2, "max_train_batch_size": 1000}, 8, (960, [4, 8, 24, 32], 6)),
]


@pytest.mark.parametrize(("keys", "world", "expected"), ANSWERS)
def test_the_answers_of_deepspeed(
    keys: dict[str, Any], world: int, expected: tuple[int, list[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = section(**{"max_train_batch_size": 2000, **keys})
    batch, valid, micro = compute_elastic_config(config, world_size=world)
    assert (batch, valid[:2] + valid[-2:], micro) == expected
    monkeypatch.setenv("WORLD_SIZE", str(world * keys.get("model_parallel_size", 1)))
    of_environment = compute_elastic_config(config, return_microbatch=True)
    assert of_environment[:2] == (batch, valid) == compute_elastic_config(config)


def test_the_micro_batch_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the smaller batch is preferred, it is the first that fits; with world_size always the largest."""
    smaller = section(prefer_larger_batch=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert [compute_elastic_config(smaller, None, world, True)[2] for world in (0, 4)] == [2, 6]
    assert compute_elastic_config(section(), return_microbatch=True)[2] == 6
    monkeypatch.setenv("WORLD_SIZE", "11")
    with pytest.raises(ElasticityIncompatibleWorldSize, match="11 data-parallel ranks do not fit"):
        compute_elastic_config(section(), return_microbatch=True)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ElasticityConfigError, match="'many'"):
        compute_elastic_config(section(), return_microbatch=True)


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
def test_wrong_sections(config: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ElasticityConfigError, match=says) as error:
        compute_elastic_config(config)
    assert isinstance(error.value, ConfigError)
    with pytest.raises(ElasticityConfigError, match=r"world_size"):
        compute_elastic_config(section(), return_microbatch=True)


def engine_of(world: int, **more: Any) -> list[tuple[int, int, int]]:
    cfg = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **section(**more.pop("section", {})), **more}
    return engines(make(), world, cfg, lambda engine, rank: engine.get_batch_info())


def test_an_engine_takes_the_batch_of_its_world() -> None:
    batches = set()
    for world in (1, 2, 3):
        batch, _, micro = compute_elastic_config(section(), world_size=world)
        for info in engine_of(world):
            assert info == (batch, micro, batch // (micro * world))
        batches.add(batch)
    assert len(batches) == 1
    ignoring = {"ignore_non_elastic_batch_info": True}
    assert engine_of(1, section=ignoring, train_batch_size=7) == engine_of(1)
    with pytest.raises(ElasticityConfigError, match=r"gradient_accumulation_steps beside it"):
        engine_of(1, gradient_accumulation_steps=2)
    with pytest.raises(ElasticityIncompatibleWorldSize, match=r"2 data-parallel ranks do not fit"):
        engine_of(2, section={"max_gpus": 1})


def test_enabled() -> None:
    assert (
        elasticity_enabled(section()) and not elasticity_enabled({}) and not elasticity_enabled(section(enabled=False))
    )
