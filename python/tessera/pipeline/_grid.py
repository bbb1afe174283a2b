"""The places of a pipeline's ranks: stages are runs of neighbours, and inside a stage lie the axes of an engine."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tessera import _core
from tessera._device import checked_device, group_device, group_timeout
from tessera._mesh import OwnGroups, core_group
from tessera.pipeline._module import PipelineModule


class Everyone:
    """All processes, and what they agree on. `processes`: of torch, None where there is one."""

    def __init__(self) -> None:
        started = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if started else (0, 1)
        self.processes = dist.group.WORLD if self.size > 1 else None
        self.group = core_group(None)
        self.device = (group_device(self.processes) if self.processes is not None else None) or torch.device("cpu")

    def values(self, own: Any) -> list[Any]:
        """What each rank passes, in the order of ranks; what JSON can say. Collective."""
        texts = _core.texts_of(self.group, json.dumps(own), "what stages agree on", self.device)
        return [json.loads(text) for text in texts]


class Grid:
    """The process groups of a pipeline of `stages` stages over all processes.

    Rank r is on stage r // size, at place r % size; the ranks of one place are one pipeline, and those of one stage an
    engine. `shards`, `sp`, `tp`: as in core_mesh(), inside a stage. Local; connect() makes the groups.
    """

    def __init__(self, everyone: Everyone, stages: int, shards: int = -1, sp: int = 1, tp: int = 1) -> None:
        self.stages = stages
        self.size = everyone.size // stages
        self.rank = everyone.rank
        self.stage, self.place = divmod(self.rank, self.size)
        self.device: torch.device | None = None  # the device of all processes: a mesh does not say it
        self.groups = OwnGroups()
        self.stage_ranks: Any = None  # the ranks as Engine takes them: None is all processes
        self.axes: list[_core.Axes] = []  # of a stage that is one of several: its engine's groups
        self._asked = (shards, sp, tp)
        self._shape = _core.mesh_shape(self.size, shards, sp, tp)

    def connect(self, everyone: Everyone) -> None:
        """Collective over all processes."""
        self.device = checked_device(None)
        forwards = backwards = None  # messages
        if self.stages > 1:
            rows = [list(range(stage * self.size, (stage + 1) * self.size)) for stage in range(self.stages)]
            self.stage_ranks = self._mesh(everyone.group, rows)
            pipes = [[stage * self.size + place for stage in range(self.stages)] for place in range(self.size)]
            # A group for each direction: over NCCL a send waits for what was asked of its group before.
            self.forwards, self.backwards = self.new_group(pipes), self.new_group(pipes)
            device = self.device or torch.device("cpu")
            forwards, backwards = (
                _core.point_to_point(group.group_name, device) for group in (self.forwards, self.backwards)
            )
        self.ranks = _core.PipelineRanks(
            self.stages,
            self.size,
            self.rank,
            everyone.group,
            everyone.device,
            forwards,
            backwards,
            list(range(self.stages)),
        )

    def forget(self) -> None:
        """Lets go of the process groups."""
        self.__dict__.pop("ranks", None)

    def _mesh(self, everyone: _core.Group, rows: list[list[int]]) -> Any:
        """The mesh of this stage; its groups are made together with those of the others."""
        _core.check_asked(everyone, self.device or torch.device("cpu"), *self._asked)
        shape = self._shape
        self.axes = shape.groups()
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

    def tied(self, model: PipelineModule) -> list[tuple[str, list[int], list[tuple[str, nn.Parameter]]]]:
        """Tied modules that are on several stages, as the core takes them: key, stages, parameters of the copy here."""
        return [
            (key, stages, self._params(model, key) if self.stage in stages else [])
            for key, stages in model.tied_stages().items()
            if len(stages) > 1
        ]

    def _params(self, model: PipelineModule, key: str) -> list[tuple[str, nn.Parameter]]:
        return [(f"tied_modules.{key}.{name}", param) for name, param in model.tied_modules[key].named_parameters()]
