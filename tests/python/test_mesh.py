"""Groups and meshes that need no other process; those of several ranks are in test_distributed.py."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from support import run_ranks
from tessera._mesh import OwnGroups, core_group, core_mesh, discard, mesh_sizes, world_of
from tessera.errors import ConfigError
from torch.distributed.device_mesh import init_device_mesh

import tessera
from tessera import _core

AXES = (_core.Axis.DpReplicate, _core.Axis.DpShard, _core.Axis.Sp, _core.Axis.Tp)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_groups_of_the_core_are_taken_as_they_are() -> None:
    def body(rank: int, group: tessera.Group) -> None:
        assert core_group(group) is group
        mesh, made = core_mesh(group)
        assert [mesh.size(axis) for axis in AXES] == [1, 2, 1, 1] and made == [] and made.along == {}
        assert core_mesh(mesh)[0] is mesh and world_of(mesh) == (rank, 2)

    run_ranks(2, body)


def test_one_process_needs_no_process_group(alone: None) -> None:
    assert core_group().size == core_group(dist.group.WORLD).size == 1
    mesh, made = core_mesh()
    assert world_of(mesh) == (0, 1) and made == [] and made.along == {"dp_shard": dist.group.WORLD}


def test_sizes_that_need_process_groups_of_torch() -> None:
    sizes = mesh_sizes(tessera.Config.from_json('{"sequence_parallel_size": 2}'))
    assert sizes == {"shards": -1, "sp": 2, "tp": 1}

    def body(_: int, group: tessera.Group) -> None:
        with pytest.raises(ConfigError, match="pass a Mesh with these axes"):
            core_mesh(group, **sizes)

    run_ranks(2, body)
    with pytest.raises(ConfigError, match="sequence_parallel_size is 2, but the mesh has 1 ranks along 'sp'"):
        core_mesh(_core.Mesh(tessera.thread_groups(2)[0]), **sizes)


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
            core_mesh(mesh)
    else:
        assert list(core_mesh(mesh)[1].along) == along


def test_a_forked_copy_only_forgets_groups(alone: None) -> None:
    groups = OwnGroups([dist.group.WORLD], {"dp_shard": dist.group.WORLD})
    groups.process = os.getppid()
    discard(groups)
    assert groups == [] and groups.along == {} and dist.is_initialized()
