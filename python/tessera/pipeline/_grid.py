"""Where the ranks of a pipeline are: stages are runs of neighbours, and inside a stage lie the axes of an engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tessera import _core
from tessera._device import checked_device, group_timeout
from tessera._mesh import OwnGroups, core_group
from tessera.pipeline._wire import Peer


class Grid:
    """The process groups of a pipeline of `stages` stages over all processes.

    Rank r is on stage r // size, at place r % size; the ranks of one place are one pipeline, and those of one stage an
    engine. `shards`, `sp`, `tp`: as in core_mesh(), inside a stage. Collective over all processes.
    """

    def __init__(self, stages: int, shards: int = -1, sp: int = 1, tp: int = 1) -> None:
        self.stages = stages
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.size = world // stages
        self.stage, self.place = divmod(rank, self.size)
        self.rank = rank
        self.device = checked_device(None)  # of all processes: a mesh does not say
        self.groups = OwnGroups()
        self.stage_ranks: Any = None  # as Engine takes it: None is all processes
        if stages > 1:
            rows = [list(range(stage * self.size, (stage + 1) * self.size)) for stage in range(stages)]
            self.stage_ranks = self._mesh(rows, shards, sp, tp)
            pipes = [[stage * self.size + place for stage in range(stages)] for place in range(self.size)]
            self.forwards, self.backwards = self.new_group(pipes), self.new_group(pipes)

    def _mesh(self, rows: list[list[int]], shards: int, sp: int, tp: int) -> Any:
        """Of this stage; its groups are made together with those of the others."""
        _core.check_asked(core_group(None), self.device or torch.device("cpu"), shards, sp, tp)
        shape = _core.mesh_shape(self.size, shards, sp, tp)
        if shape.size(_core.Axis.DpShard) == self.size:
            return self.new_group(rows)
        mesh = _core.Mesh()
        for axes in shape.groups():
            parts = {
                tuple(row[other] for other in shape.ranks_along(axes, number))
                for row in rows
                for number in range(self.size)
            }
            mesh.set(axes, core_group(self.new_group([list(part) for part in sorted(parts)])))
        return mesh

    def new_group(self, rows: list[list[int]]) -> Any:
        """The group of the row that this rank is in, None without one; of every process the same rows."""
        group = dist.new_subgroups_by_enumeration(rows, timeout=group_timeout())[0]
        if group is not None:
            self.groups.append(group)
        return group

    def name(self, rank: int | None = None) -> str:
        """A rank in words."""
        rank = self.rank if rank is None else rank
        return f"stage {rank // self.size} (rank {rank})"

    def peer(self, stage: int) -> Peer:
        stage %= self.stages
        return Peer(stage * self.size + self.place, stage)
