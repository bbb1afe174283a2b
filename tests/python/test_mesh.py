"""Groups and meshes that need no other process; those of several ranks are in test_distributed.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from support import config, make, run_ranks
from tessera.errors import ConfigError
from torch.distributed.device_mesh import init_device_mesh

import tessera

AXES = (tessera.Axis.DpReplicate, tessera.Axis.DpShard, tessera.Axis.Sp, tessera.Axis.Tp)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sizes_of(group: Any, **more: Any) -> list[int]:
    """Of an engine's axes."""
    engine = tessera.Engine(make(), config(1, **more), group=group)
    sizes = [engine.core.mesh().size(axis) for axis in AXES]
    engine.destroy()
    return sizes


def test_groups_of_the_core_are_taken_as_they_are() -> None:
    def body(rank: int, group: tessera.Group) -> None:
        engine = tessera.Engine(make(), config(1), group=group)
        assert engine.core.mesh().group(tessera.Axis.DpShard) is group
        assert (engine.global_rank, engine.world_size) == (rank, 2)
        assert [engine.core.mesh().size(axis) for axis in AXES] == [1, 2, 1, 1]
        engine.destroy()
        assert sizes_of(tessera.Mesh().set(tessera.Axis.DpReplicate, group)) == [2, 1, 1, 1]

    run_ranks(2, body)


def test_one_process_needs_no_process_group(alone: None) -> None:
    for group in (None, dist.group.WORLD):
        engine = tessera.Engine(make(), config(1), group=group)
        assert engine.process_group("dp_shard") is dist.group.WORLD
        engine.destroy()
        assert dist.is_initialized() and sizes_of(group) == [1, 1, 1, 1]


def test_sizes_that_need_process_groups_of_torch() -> None:
    def body(_: int, group: tessera.Group) -> None:
        with pytest.raises(ConfigError, match="pass a Mesh with these axes"):
            sizes_of(group, sequence_parallel_size=2)

    run_ranks(2, body)
    with pytest.raises(ConfigError, match="sequence_parallel_size is 2, but the mesh has 1 ranks along 'sp'"):
        sizes_of(tessera.Mesh(tessera.thread_groups(2)[0]), sequence_parallel_size=2)


@pytest.mark.parametrize(
    ("names", "along"),
    [
        (("data",), ["dp_shard"]),  # by its place
        (("rows", "columns"), ["dp_replicate", "dp_shard"]),
        (("dp_shard", "tp"), ["dp_shard", "tp"]),
        (("tp", "sp"), None),  # not in the order of ranks
        (("dp_shard", "other"), None),
        (("a", "b", "c"), None),
    ],
)
def test_dimensions_of_a_device_mesh(names: tuple[str, ...], along: list[str] | None, alone: None) -> None:
    mesh = init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)
    if along is None:
        with pytest.raises(ConfigError, match="name them, in this order"):
            tessera.Engine(make(), config(1), group=mesh)
    else:
        engine = tessera.Engine(make(), config(1), group=mesh)
        known = ("dp_replicate", "dp_shard", "sp", "tp")
        found = {axis: engine.process_group(axis) for axis in known}
        assert {axis: group for axis, group in found.items() if group is not None} == dict(
            zip(along, mesh.get_all_groups(), strict=True)
        )
        engine.destroy()
