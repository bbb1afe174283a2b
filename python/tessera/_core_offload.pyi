"""Types of the compiled module, continued: states that live elsewhere. At run time all are in `tessera._core` only."""

from enum import Enum
from typing import Final

class Residence(Enum):
    Device = ...
    Host = ...
    Nvme = ...

class UpdatedBy(Enum):
    Device = ...
    Through = ...
    Host = ...

class Rates:
    bus: Final[float]
    host: Final[float]
    memory: Final[float]
    device: Final[float]
    disk: Final[float]

class OffloadRow:
    unit: Final[str]
    elements: Final[int]
    states: Final[Residence]
    by: Final[UpdatedBy]

class OffloadPlan:
    ratio: Final[float]
    device_share: Final[float]
    rates: Final[Rates | None]
    milliseconds: Final[float]
    bus: Final[float]
    host: Final[float]
    memory: Final[float]
    device: Final[float]
    disk: Final[float]
    in_backward: Final[bool]
    runs_on: Final[bool]
    units: Final[list[OffloadRow]]
    def step(self, forward: float, backward: float, micro_batches: int = 1) -> float: ...
    def text(self) -> str: ...
