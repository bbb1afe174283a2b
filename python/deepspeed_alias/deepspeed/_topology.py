"""The places of a pipeline's ranks: topologies, which PipelineModule takes, and their grid."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from tessera.errors import ConfigError, UsageError


class ProcessTopology:
    """Ranks on a grid of named axes, the last one the fastest."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes = list(axes)
        self.dims = list(dims)
        self.ProcessCoord = namedtuple("ProcessCoord", axes)  # type: ignore[misc]
        places = itertools.product(*map(range, dims))
        self._coords = [self.ProcessCoord._make(place) for place in places]  # type: ignore[attr-defined]

    def world_size(self) -> int:
        return len(self._coords)

    def get_dim(self, axis: str) -> int:
        """0 for an axis that it has not."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **place: int) -> int:
        return self._coords.index(self.ProcessCoord(**place))

    def get_coord(self, rank: int) -> Any:
        return self._coords[rank]

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """The rank's place in words, as "model_01"."""
        coord = self.get_coord(rank)
        return outer_sep.join(
            f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in self.axes if axis not in omit_axes
        )

    def filter_match(self, **place: int) -> list[int]:
        """The ranks that have these places along the axes, anywhere along the others."""
        return [
            rank
            for rank, coord in enumerate(self._coords)
            if all(getattr(coord, axis) == at for axis, at in place.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ along `axis` only; none for an axis that there is not."""
        if axis not in self.axes:
            return []
        others = [other for other in self.axes if other != axis]
        places = itertools.product(*(range(self.get_dim(other)) for other in others))
        return [self.filter_match(**dict(zip(others, place, strict=True))) for place in places]


class PipeDataParallelTopology(ProcessTopology):
    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """num_mp is tensor_parallel.autotp_size of the configuration."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def _of_world(ranks: int) -> ProcessTopology:
    """Prime factors of the number of ranks, from the smallest on, in turn to stages and to replicas."""
    sizes, place, factor = [1, 1], 0, 2
    while ranks > 1:
        if ranks % factor:
            factor += 1
            continue
        sizes[place] *= factor
        ranks //= factor
        place = 1 - place
    return PipeDataParallelTopology(*sizes)


class PipelineParallelGrid:
    """A rank's place in a topology. The groups are those of the engine, which sets `groups`; a grid that is made
    without a rank is this process's and makes its own (collective over all processes)."""

    def __init__(self, topology: ProcessTopology | None = None, rank: int | None = None) -> None:
        makes_groups = rank is None
        if rank is None:
            rank = dist.get_rank()
        if topology is None:
            topology = _of_world(dist.get_world_size())
        self._topology = topology
        self.groups: dict[str, Callable[[], Any]] = {}
        self.global_rank, self.world_size = rank, topology.world_size()
        if rank >= self.world_size:
            raise ConfigError(f"[pipeline] the topology is of {self.world_size} ranks, but there is a rank {rank}")
        self.pipe_parallel_size, self.data_parallel_size, self.model_parallel_size = (
            max(1, topology.get_dim(axis)) for axis in ("pipe", "data", "model")
        )
        self.slice_parallel_size = self.model_parallel_size
        coord = topology.get_coord(rank)
        self.stage_id, self.data_parallel_id = getattr(coord, "pipe", 0), getattr(coord, "data", 0)
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.pp_group, self.dp_group = self._row("pipe"), self._row("data")
        if makes_groups:
            self._make_groups()

    def _make_groups(self) -> None:
        if dist.get_world_size() != self.world_size:
            raise ConfigError(
                f"[pipeline] the topology is of {self.world_size} ranks, but there are {dist.get_world_size()}"
            )
        for axis in ("pipe", "data", "model"):
            rows = self._topology.get_axis_comm_lists(axis) or [[rank] for rank in range(self.world_size)]
            made = {tuple(row): dist.new_group(row) for row in rows}
            mine = next(group for row, group in made.items() if self.global_rank in row)
            self.groups[axis] = lambda group=mine: group  # type: ignore[misc]

    def _row(self, axis: str) -> list[int]:
        """The ranks that differ from this one along `axis` only."""
        rows = self._topology.get_axis_comm_lists(axis)
        return next((row for row in rows if self.global_rank in row), [self.global_rank])

    def _group(self, axis: str) -> Any:
        if axis not in self.groups:
            raise UsageError(
                f"[pipeline] the {axis}-parallel group is the engine's: ask engine.grid, after deepspeed.initialize()"
            )
        return self.groups[axis]()

    def topology(self) -> ProcessTopology:
        return self._topology

    def stage_to_global(self, stage_id: int, **place: int) -> int:
        """The rank of the same place on another stage."""
        coord = self._topology.get_coord(self.global_rank)._asdict()
        return self._topology.get_rank(**{**coord, "pipe": stage_id, **place})

    def get_global_rank(self) -> int:
        return self.global_rank

    def get_stage_id(self) -> int:
        return self.stage_id

    def get_pipe_parallel_rank(self) -> int:
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        return self._group("pipe")

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    def get_data_parallel_id(self) -> int:
        return self.data_parallel_id

    get_data_parallel_rank = get_data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        return self._group("data")

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        """This rank's number among all stages and slices of one replica."""
        return self._replica().index(self.global_rank)

    def get_model_parallel_world_size(self) -> int:
        return len(self._replica())

    def _replica(self) -> list[int]:
        return (
            self._topology.filter_match(data=self.data_parallel_id) if "data" in self._topology.axes else self.pp_group
        )

    def get_model_parallel_group(self) -> Any:
        if self.model_parallel_size > 1 and self.pipe_parallel_size > 1:
            raise NotImplementedError(
                "[pipeline] there is no group of all stages and slices of one replica; use get_pipe_parallel_group() "
                "or get_slice_parallel_group()"
            )
        return self._group("pipe" if self.pipe_parallel_size > 1 else "model")

    def get_slice_parallel_rank(self) -> int:
        return int(getattr(self._topology.get_coord(self.global_rank), "model", 0))

    def get_slice_parallel_world_size(self) -> int:
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> Any:
        return self._group("model")

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group
