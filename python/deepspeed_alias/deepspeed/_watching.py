"""deepspeed.monitor: the writers of tessera.monitor under the attributes that callers read."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from tessera.monitor import Event, Monitor, Writer


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


class MonitorMaster(Monitor):
    """All monitors of a DeepSpeedMonitorConfig (deepspeed.monitor.config), one by one and together."""

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config.resolved, dist.get_rank() if dist.is_initialized() else 0)

    def __getattr__(self, name: str) -> Any:
        if name not in _NAMES:
            raise AttributeError(name)
        writer = self.writers.get(_NAMES[name])
        return _Absent() if writer is None else _Present(writer)
