"""Where an engine's numbers go while it trains: TensorBoard, CSV files, Weights & Biases, Comet; sections of the
configuration of these names. Rank 0 writes.

An event is (name, value, x), as ("Train/Samples/lr", 1e-3, 640): x counts samples. Files lie in OUTPUT_PATH/JOB_NAME,
by default in ~/tensorboard and ~/csv_monitor; a CSV file is called as its event, with _ for /, and has the columns step
and the last part of the name.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from tessera import _core
from tessera.errors import ConfigError

__all__ = ["Event", "Monitor", "Writer"]

Event = tuple[str, float, int]


class Writer(Protocol):
    def write(self, events: Iterable[Event]) -> None: ...

    def close(self) -> None: ...


def _folder(section: dict[str, Any], default: str) -> Path:
    base = Path(section["output_path"] or Path.home() / default)
    found = base / section["job_name"]
    found.mkdir(parents=True, exist_ok=True)
    return found


class TensorBoard:
    """Event files of TensorBoard."""

    def __init__(self, section: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.summary_writer = SummaryWriter(str(_folder(section, "tensorboard")))

    def write(self, events: Iterable[Event]) -> None:
        for name, value, x in events:
            self.summary_writer.add_scalar(name, value, x)
        self.summary_writer.flush()

    def close(self) -> None:
        self.summary_writer.close()


class Csv:
    """One file for each name of an event; a run that goes on appends to what is there."""

    def __init__(self, section: dict[str, Any]) -> None:
        self.log_dir = _folder(section, "csv_monitor")

    def write(self, events: Iterable[Event]) -> None:
        for name, value, x in events:
            path = self.log_dir / (name.replace("/", "_").replace(" ", "_") + ".csv")
            with open(path, "a", newline="") as file:
                writer = csv.writer(file)
                if os.fstat(file.fileno()).st_size == 0:
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([x, value])

    def close(self) -> None: ...


class WeightsAndBiases:
    """A run of wandb."""

    def __init__(self, section: dict[str, Any]) -> None:
        self._wandb = importlib.import_module("wandb")
        self._wandb.init(project=section["project"], group=section["group"], entity=section["team"])

    def write(self, events: Iterable[Event]) -> None:
        for name, value, x in events:
            self._wandb.log({name: value}, step=x)

    def close(self) -> None:
        self._wandb.finish()


class Comet:
    """An experiment of Comet; of a name no more than one point in samples_log_interval samples."""

    _ARGUMENTS = {
        "api_key": "api_key",
        "project": "project",
        "workspace": "workspace",
        "experiment_key": "experiment_key",
        "mode": "mode",
        "online": "online",
    }

    def __init__(self, section: dict[str, Any]) -> None:
        comet = importlib.import_module("comet_ml")
        given = {name: section[key] for key, name in self._ARGUMENTS.items() if section[key] is not None}
        self.experiment = comet.start(**given)
        if section["experiment_name"] is not None:
            self.experiment.set_name(section["experiment_name"])
        self._interval = section["samples_log_interval"]
        self._last: dict[str, int] = {}

    def write(self, events: Iterable[Event]) -> None:
        for name, value, x in events:
            if name not in self._last or x - self._last[name] >= self._interval:
                self._last[name] = x
                self.experiment.log_metric(name, value, step=x)

    def close(self) -> None:
        self.experiment.end()


# Section of the configuration -> (what writes, the package that it needs).
WRITERS: dict[str, tuple[Callable[[dict[str, Any]], Writer], str | None]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "csv_monitor": (Csv, None),
    "wandb": (WeightsAndBiases, "wandb"),
    "comet": (Comet, "comet_ml"),
}


class Monitor:
    """The writers that a configuration switches on; without any, and on other ranks than 0, a call does nothing."""

    def __init__(self, config: _core.Config, rank: int = 0) -> None:
        """ConfigError, on all ranks, where a package is not installed that a section needs."""
        tree = config.to_dict()
        wanted = [name for name in WRITERS if tree[name]["enabled"]]
        missing = [(name, package) for name in wanted if (package := WRITERS[name][1]) and not _installed(package)]
        if missing:
            lines = [f"{name}.enabled needs the package {package}: pip install {package}" for name, package in missing]
            raise ConfigError("[config] " + "; ".join(lines))
        self.enabled = bool(wanted)
        self.writers: dict[str, Writer] = {name: WRITERS[name][0](tree[name]) for name in wanted if rank == 0}

    def write_events(self, events: Iterable[Event]) -> None:
        events = list(events)
        for writer in self.writers.values():
            writer.write(events)

    def close(self) -> None:
        """Ends what was opened; safe to call twice."""
        writers, self.writers = self.writers, {}
        for writer in writers.values():
            writer.close()


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
