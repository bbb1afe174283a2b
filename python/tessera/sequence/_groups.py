"""Groups of sequence-parallel training as an object: the `mpu` of tessera.initialize."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tessera import _core
from tessera._mesh import core_group
from tessera.distributed import init_distributed
from tessera.errors import ConfigError


class SequenceParallelGroups:
    """The ranks that share a sequence with this one, those that have another batch, both, and those that hold other
    slices of the model (none by default): torch ProcessGroups or groups of tessera. To be given to tessera.initialize
    as `mpu`."""

    def __init__(self, sequence: Any, data: Any, both: Any, tensor: Any = None) -> None:
        self._groups = {"sequence": sequence, "data": data, "both": both}
        self._groups["tensor"] = _core.single_group() if tensor is None else tensor
        self._core = {name: core_group(group) for name, group in self._groups.items()}
        sizes = {name: group.size for name, group in self._core.items()}
        if sizes["sequence"] * sizes["data"] != sizes["both"]:
            raise ConfigError(
                f"[sequence] {sizes['sequence']} sequence-parallel x {sizes['data']} data-parallel ranks are not the "
                f"{sizes['both']} ranks of both"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallelGroups:
        return self

    def core(self, name: str = "sequence") -> _core.Group:
        return self._core[name]

    def get_sequence_parallel_group(self) -> Any:
        return self._groups["sequence"]

    def get_sequence_parallel_rank(self) -> int:
        return self._core["sequence"].rank

    def get_sequence_parallel_world_size(self) -> int:
        return self._core["sequence"].size

    def get_data_parallel_group(self) -> Any:
        return self._groups["data"]

    def get_data_parallel_rank(self) -> int:
        return self._core["data"].rank

    def get_data_parallel_world_size(self) -> int:
        return self._core["data"].size

    def get_sequence_data_parallel_group(self) -> Any:
        """Over which gradients are averaged and states sharded."""
        return self._groups["both"]

    def get_sequence_data_parallel_rank(self) -> int:
        return self._core["both"].rank

    def get_sequence_data_parallel_world_size(self) -> int:
        return self._core["both"].size

    def get_tensor_model_parallel_group(self) -> Any:
        return self._groups["tensor"]

    def get_tensor_model_parallel_rank(self) -> int:
        return self._core["tensor"].rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._core["tensor"].size


def initialize_sequence_parallel(
    sequence_parallel_size: int, *, tensor_parallel_size: int = 1
) -> SequenceParallelGroups:
    """All processes: `tensor_parallel_size` that follow one another hold slices of one model (then
    tensor_parallel.autotp_size must say the same), `sequence_parallel_size` neighbours of those share a sequence, and
    each such row has a batch of its own. Creates the default process group if there is none. Collective over all
    processes."""
    init_distributed()
    sizes = {"sequence_parallel_size": sequence_parallel_size, "tensor_parallel_size": tensor_parallel_size}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"[sequence] {name} must be 1 at least, got {size}")
    shape = _core.mesh_shape(dist.get_world_size(), sp=sequence_parallel_size, tp=tensor_parallel_size)
    sequence, data, tensor = (_along(shape, axis) for axis in (_core.Axis.Sp, _core.Axis.DpShard, _core.Axis.Tp))
    return SequenceParallelGroups(sequence, data, _along(shape, _core.Axis.DpShard, _core.Axis.Sp), tensor)


def _along(shape: _core.MeshShape, *axes: _core.Axis) -> Any:
    """This rank's process group along axes together; all processes where these have them all."""
    ranks = range(dist.get_world_size())
    if shape.size(list(axes)) == len(ranks):
        return dist.group.WORLD
    rows = sorted({tuple(shape.ranks_along(list(axes), rank)) for rank in ranks})
    return dist.new_subgroups_by_enumeration([list(row) for row in rows])[0]
