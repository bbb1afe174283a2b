"""deepspeed.elasticity: DeepSpeed's own answers."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.elasticity import compute_elastic_config, elasticity_enabled
from deepspeed.elasticity.config import ElasticityConfigError, ElasticityIncompatibleWorldSize


def section(**more: Any) -> dict[str, Any]:
    return {"elasticity": {"enabled": True, "max_train_batch_size": 1000, "micro_batch_sizes": [2, 4, 6], **more}}


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
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ElasticityConfigError, match=r"give world_size"):
        compute_elastic_config(section(), return_microbatch=True)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ElasticityConfigError, match="'many'"):
        compute_elastic_config(section(), return_microbatch=True)


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"},
        {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"},
        {"RANK": "3", "WORLD_SIZE": "4"},
    ],
    ids=["mpirun", "srun", "torchrun"],
)
def test_the_ranks_are_those_of_any_launcher(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = section(prefer_larger_batch=False)
    assert compute_elastic_config(config, return_microbatch=True)[2] == 2


def test_enabled() -> None:
    assert (
        elasticity_enabled(section()) and not elasticity_enabled({}) and not elasticity_enabled(section(enabled=False))
    )
