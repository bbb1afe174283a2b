"""Types of the compiled module, continued: tessera/pipeline. At run time these names are in `tessera._core` only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from tessera._core import Engine, Group, PointToPoint

class StageAction: ...

class PipelineShape:
    micro_batches: Final[int]
    def __init__(self, stages: int, micro_batches: int, chunks: int = 1) -> None: ...
    def is_first(self, stage: int, chunk: int) -> bool: ...
    def is_last(self, stage: int, chunk: int) -> bool: ...

def training_table(name: str, shape: PipelineShape, stage: int) -> list[StageAction]: ...
def forward_table(shape: PipelineShape, stage: int) -> list[StageAction]: ...
def split_weights(weights: Sequence[float], parts: int) -> list[int]: ...

class PipelineRanks:
    def __init__(
        self,
        stages: int,
        size: int,
        rank: int,
        everyone: Group,
        device: torch.device,
        forwards: PointToPoint | None,
        backwards: PointToPoint | None,
        peers: Sequence[int],
    ) -> None: ...
    def name(self, rank: int) -> str: ...

def rows_of(everyone: Group, own: Sequence[float], label: str, device: torch.device) -> list[list[float]]: ...
def texts_of(everyone: Group, own: str, label: str, device: torch.device) -> list[str]: ...

# `batch`: what the core calls of it is in python/tessera/pipeline/_batch.py.
class Ties:
    def __init__(
        self, ranks: PipelineRanks, tied: Sequence[tuple[str, list[int], Sequence[tuple[str, torch.Tensor]]]]
    ) -> None: ...
    def attach(self, engine: Engine, batch: Any) -> None: ...
    def follow(self, engine: Engine, batch: Any) -> None: ...
    def sum_gradients(self, engine: Engine, batch: Any) -> None: ...

def step_together(members: Sequence[Any], everyone: Group | None, device: torch.device) -> float | None: ...

class BatchResult:
    loss: Final[float | None]  # the mean; None where the last stage computes none
    most_live: Final[int]  # activations held at one time

class PipelineRunner:
    def __init__(
        self, ranks: PipelineRanks, ties: Ties, chunks: int, device: torch.device, beside: Sequence[Group]
    ) -> None: ...
    def run(
        self, engine: Engine, batch: Any, table: Sequence[StageAction], shape: PipelineShape, trains: bool
    ) -> BatchResult: ...
    def announce_lost(self, text: str) -> None: ...

# Of a link (tessera/pipeline/link.h); layouts and `dims` are those of tessera/hybrid/_layout.py.
class PythonPointToPoint(PointToPoint):
    def __init__(self, rank: int, size: int, channel: Any) -> None: ...

class _LinkEnd:
    def __init__(
        self,
        source: Any,
        target: Any,
        dims: Any,
        sides: tuple[str, str],
        place: int,
        p2p: PointToPoint,
        engine: Engine | None,
    ) -> None: ...
    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...
    def step(self) -> None: ...

class LinkSender(_LinkEnd):
    def send(self, outputs: Sequence[torch.Tensor], sample: str, samples: Sequence[int] | None, note: str) -> None: ...
    def gradients(self, sample: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]: ...

class LinkReceiver(_LinkEnd):
    def receive(self, sample: str) -> tuple[list[torch.Tensor], str]: ...
    def give_back(self, sample: str, gradients: Sequence[torch.Tensor | None] | None) -> None: ...

def hand_over(
    sender: LinkSender,
    receiver: LinkReceiver,
    outputs: Sequence[torch.Tensor],
    sample: str,
    samples: Sequence[int] | None,
) -> list[torch.Tensor]: ...
