"""deepspeed.monitor: the writers of tessera.monitor under the attributes that callers read; the profiler of flops."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from tessera.monitor import WRITERS, Event, Monitor, Writer
from torch import nn

from tessera import flops


class _Absent:
    """A monitor that the configuration does not switch on."""

    enabled = False

    def write_events(self, event_list: list[Event]) -> None: ...


class _Present:
    enabled = True

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def write_events(self, event_list: list[Event]) -> None:
        self._writer.write(event_list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


_NAMES = {"tb_monitor": "tensorboard", "csv_monitor": "csv_monitor", "wandb_monitor": "wandb", "comet_monitor": "comet"}


class _OfOneSection:
    """A monitor by itself: of a section as an object (deepspeed.monitor.config). Rank 0 writes."""

    _name = ""

    def __init__(self, section: Any) -> None:
        self.monitor_config = section
        self.enabled: bool = section.enabled
        self.writer = WRITERS[self._name][0](section) if self.enabled and _rank() == 0 else None

    def write_events(self, event_list: Iterable[Event], flush: bool = True) -> None:
        if self.writer is not None:
            self.writer.write(event_list)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self.__dict__.get("writer") is None:
            raise AttributeError(name)
        return getattr(self.writer, name)


class csvMonitor(_OfOneSection):
    _name = "csv_monitor"


class TensorBoardMonitor(_OfOneSection):
    _name = "tensorboard"


class WandbMonitor(_OfOneSection):
    _name = "wandb"


class CometMonitor(_OfOneSection):
    _name = "comet"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class MonitorMaster(Monitor):
    """All monitors of a DeepSpeedMonitorConfig (deepspeed.monitor.config), one by one and together."""

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config.resolved, _rank())

    def __getattr__(self, name: str) -> Any:
        if name not in _NAMES:
            raise AttributeError(name)
        writer = self.writers.get(_NAMES[name])
        return _Absent() if writer is None else _Present(writer)


class FlopsProfiler(flops.FlopsProfiler):
    """tessera.flops.FlopsProfiler; `ds_engine` is not asked."""

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        super().__init__(model, recompute_fwd_factor)
