"""Where this process is among those of an engine."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tessera import _core, _mesh


class Ranks:
    """The mesh of an engine, and what it says of this process. `group`, `sequence_parallel` and `tensor_parallel` are
    Engine's; `device`: on which the ranks talk. Collective, as _mesh.core_mesh()."""

    def __init__(
        self,
        group: _mesh.Ranks | None,
        settings: _core.Config,
        device: torch.device | None,
        sequence_parallel: int | None = None,
        tensor_parallel: int | None = None,
    ) -> None:
        asked = {"sp": sequence_parallel, "tp": tensor_parallel}
        sizes = _mesh.mesh_sizes(settings) | {axis: size for axis, size in asked.items() if size is not None}
        self.cuts = sizes["tp"] > 1  # the model is to be cut
        self.mesh, self._made = _mesh.core_mesh(group, **sizes, device=device)
        self._batch_rank, self._batch_size = self.mesh.batch_rank(), self.mesh.batch_size()
        self._world = _mesh.world_of(self.mesh)

    def number(self) -> int:
        """This rank's number among those of the engine."""
        return self.mesh.rank(list(_core.Axis.__members__.values()))

    def share_states(self) -> int:
        """Ranks that share model states."""
        return self.mesh.size(_core.Axis.DpShard) * self.mesh.size(_core.Axis.Sp)

    def release(self) -> None:
        """Holds no process group any more."""
        self.mesh = _core.Mesh()

    def discard(self) -> None:
        """Destroys the process groups that were made for this engine."""
        _mesh.discard(self._made)

    # ---- what Engine shows

    @property
    def world_size(self) -> int:
        """All processes of the job; dp_world_size counts those that share this model's batch."""
        return self._world[1]

    @property
    def global_rank(self) -> int:
        """This process's number among all of the job."""
        return self._world[0]

    @property
    def dp_world_size(self) -> int:
        """How many ranks have batches of their own."""
        return self._batch_size

    @property
    def seq_dp_world_size(self) -> int:
        """Ranks that exchange gradients: data-parallel times sequence-parallel ones."""
        return self._batch_size * self.sp_world_size

    @property
    def sp_world_size(self) -> int:
        """Ranks that share a sequence."""
        return self.mesh.size(_core.Axis.Sp)

    @property
    def tp_world_size(self) -> int:
        """Ranks that hold slices of one model."""
        return self.mesh.size(_core.Axis.Tp)

    def process_group(self, axis: str) -> dist.ProcessGroup | None:
        """The group of torch.distributed along an axis ("dp_replicate", "dp_shard", "sp", "tp"); None where there is
        none: one rank along it, or groups that are not torch's."""
        return self._made.along.get(axis)

    @property
    def dp_rank(self) -> int:
        """Which of the batches this rank has."""
        return self._batch_rank

    @property
    def sp_rank(self) -> int:
        """Which part of the sequence this rank has."""
        return self.mesh.rank(_core.Axis.Sp)

    @property
    def tp_rank(self) -> int:
        """Which slice of the model this rank has."""
        return self.mesh.rank(_core.Axis.Tp)
