"""deepspeed.pipe: tessera.pipeline with DeepSpeed's engine, and the topologies that PipelineModule takes."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

from deepspeed._engine import DeepSpeedEngine
from tessera.pipeline import PipelineEngine as TesseraPipelineEngine


class PipelineEngine(DeepSpeedEngine, TesseraPipelineEngine):
    """What deepspeed.initialize makes of a PipelineModule."""


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

    def filter_match(self, **place: int) -> list[int]:
        """The ranks that are there along these axes, anywhere along the others."""
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
