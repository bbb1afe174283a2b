"""Groups of sequence-parallel training as an object, which tessera.initialize takes as `group`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tessera import _core
from tessera._mesh import OneGroup, core_group
from tessera.distributed import init_distributed
from tessera.errors import ConfigError


class SequenceParallelGroups:
    """The ranks that share a sequence with this one (`sequence`), those that have another batch (`data`), both, over
    which gradients are averaged and states sharded (`both`), and those that hold other slices of the model (`tensor`,
    none by default): torch ProcessGroups or groups of tessera. Passed to tessera.initialize as `group`."""

    def __init__(self, sequence: OneGroup, data: OneGroup, both: OneGroup, tensor: OneGroup | None = None) -> None:
        self.sequence, self.data, self.both = sequence, data, both
        self.tensor = _core.single_group() if tensor is None else tensor
        self._core = {name: core_group(getattr(self, name)) for name in ("sequence", "data", "both", "tensor")}
        if self.size() * self.size("data") != self.size("both"):
            raise ConfigError(
                f"[sequence] {self.size()} sequence-parallel x {self.size('data')} data-parallel ranks are not the "
                f"{self.size('both')} ranks of both"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallelGroups:
        return self

    def core(self, name: str = "sequence") -> _core.Group:
        """The group of that name, as tessera's."""
        return self._core[name]

    def rank(self, name: str = "sequence") -> int:
        """This rank's number in a group."""
        return self._core[name].rank

    def size(self, name: str = "sequence") -> int:
        """How many ranks a group has."""
        return self._core[name].size

    def mesh(self, slices: int = 1) -> _core.Mesh:
        """The ranks on the axes of a mesh. ConfigError where a model is to be cut into `slices` and no group holds
        them."""
        if self.size("tensor") == 1 and slices > 1:
            raise ConfigError(
                f"[sequence] tensor_parallel.autotp_size is {slices}, and the groups have no tensor-parallel ones; "
                f"register_with_transformers and make_groups make them where they get tensor_parallel_size={slices}"
            )
        mesh, axes = _core.Mesh(), _core.Axis
        for axis, name in ((axes.DpShard, "data"), (axes.Sp, "sequence"), (axes.Tp, "tensor")):
            mesh.set(axis, self._core[name])
        if self.size() > 1 and self.size("data") > 1:
            mesh.set([axes.DpShard, axes.Sp], self._core["both"])
        return mesh


def make_groups(sequence_parallel_size: int, *, tensor_parallel_size: int = 1) -> SequenceParallelGroups:
    """Makes groups of all processes: `tensor_parallel_size` that follow one another hold slices of one model (then
    tensor_parallel.autotp_size must say the same), `sequence_parallel_size` neighbours of those share a sequence, and
    each such row has its own batch. Creates the default process group if there is none. Collective over all
    processes."""
    init_distributed()
    sizes = {"sequence_parallel_size": sequence_parallel_size, "tensor_parallel_size": tensor_parallel_size}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"[sequence] {name} must be 1 at least, got {size}")
    shape = _core.mesh_shape(dist.get_world_size(), sp=sequence_parallel_size, tp=tensor_parallel_size)
    sequence, data, tensor = (_along(shape, axis) for axis in (_core.Axis.Sp, _core.Axis.DpShard, _core.Axis.Tp))
    return SequenceParallelGroups(sequence, data, _along(shape, _core.Axis.DpShard, _core.Axis.Sp), tensor)


def _along(shape: _core.MeshShape, *axes: _core.Axis) -> OneGroup:
    """This rank's process group along axes together; all processes where these have them all."""
    ranks = range(dist.get_world_size())
    if shape.size(list(axes)) == len(ranks):
        world = dist.group.WORLD
        assert world is not None
        return world
    rows = sorted({tuple(shape.ranks_along(list(axes), rank)) for rank in ranks})
    return dist.new_subgroups_by_enumeration([list(row) for row in rows])[0]
