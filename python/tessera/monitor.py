"""Writers of an engine's numbers while it trains: TensorBoard, CSV files, Weights & Biases, Comet, sections of the
configuration of these names; lines of JSON (tessera.json_lines); functions. Rank 0 writes. Files are the core's
(io/metrics.h).

An event is (name, value, x), as ("Train/Samples/lr", 1e-3, 640): x counts samples. Files lie in OUTPUT_PATH/JOB_NAME,
by default in ~/tensorboard and ~/csv_monitor; a CSV file is called as its event, with _ for /, and has the columns step
and the last part of the name.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tessera import _core
from tessera._warnings import caught_warnings, warn_user
from tessera.errors import ConfigError, IoError

__all__ = ["Event", "JsonLines", "Monitor", "Writer"]

Event = tuple[str, float, int]


class Writer(Protocol):
    """An object in engine.monitor.writers has these two methods, called on rank 0. One that has a method
    warn(text, x), too, gets the engine's warnings by it."""

    def write(self, events: Iterable[Event]) -> None:
        """Takes events (name, value, x)."""
        ...

    def close(self) -> None:
        """Called when the engine ends."""
        ...


class _File:
    """A writer of the core's."""

    def __init__(self, kind: Callable[[str], _core.MetricWriter], path: str) -> None:
        with caught_warnings(warn_user):
            self._writer: _core.MetricWriter | None = kind(path)

    def write(self, events: Iterable[Event]) -> None:
        if self._writer is not None:
            self._writer.write([(name, value, int(x)) for name, value, x in events])

    def warn(self, text: str, x: int) -> None:
        """A warning, where the format has a place for texts."""
        if self._writer is not None:
            self._writer.warn(text, x)

    def close(self) -> None:
        self._writer = None  # its file is another writer's to take


class _Section(Protocol):
    """A section of the configuration, or an object with its keys."""

    @property
    def enabled(self) -> bool: ...


class _OfFiles(_Section, Protocol):
    @property
    def output_path(self) -> str: ...
    @property
    def job_name(self) -> str: ...


class _OfWandb(_Section, Protocol):
    @property
    def project(self) -> str: ...
    @property
    def group(self) -> str | None: ...
    @property
    def team(self) -> str | None: ...


class _OfComet(_Section, Protocol):
    @property
    def samples_log_interval(self) -> int: ...
    @property
    def project(self) -> str | None: ...
    @property
    def workspace(self) -> str | None: ...
    @property
    def api_key(self) -> str | None: ...
    @property
    def experiment_name(self) -> str | None: ...
    @property
    def experiment_key(self) -> str | None: ...
    @property
    def online(self) -> bool | None: ...
    @property
    def mode(self) -> str | None: ...


def _folder(section: _OfFiles, default: str) -> str:
    return _core.metrics_folder(section.output_path, section.job_name, default)


class TensorBoard(_File):
    """Event files of TensorBoard."""

    def __init__(self, section: _OfFiles) -> None:
        self._folder = _folder(section, "tensorboard")
        self._own: Any = None
        super().__init__(_core.tensorboard_metrics, self._folder)

    @property
    def summary_writer(self) -> Any:
        """torch's, of the same folder, for what is no scalar; it needs the package tensorboard."""
        if self._own is None:
            from torch.utils.tensorboard import SummaryWriter

            self._own = SummaryWriter(self._folder)
        return self._own

    def close(self) -> None:
        super().close()
        if self._own is not None:
            self._own.close()


class Csv(_File):
    """Writes one file for each name of an event; a run that goes on appends to what is there."""

    def __init__(self, section: _OfFiles) -> None:
        self.log_dir = Path(_folder(section, "csv_monitor"))
        super().__init__(_core.csv_metrics, str(self.log_dir))


class JsonLines(_File):
    """A line of JSON for each event and warning, appended to a file, as tessera.json_lines has it:
    engine.monitor.writers["json"] = JsonLines("run.jsonl")."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(_core.json_metrics, str(path))


class WeightsAndBiases:
    """A run of wandb."""

    def __init__(self, section: _OfWandb) -> None:
        self._wandb = importlib.import_module("wandb")
        self._wandb.init(project=section.project, group=section.group, entity=section.team)

    def write(self, events: Iterable[Event]) -> None:
        for name, value, x in events:
            self._wandb.log({name: value}, step=x)

    def close(self) -> None:
        self._wandb.finish()


class Comet:
    """An experiment of Comet; of a name no more than one point in samples_log_interval samples."""

    def __init__(self, section: _OfComet) -> None:
        comet = importlib.import_module("comet_ml")
        given = {
            "api_key": section.api_key,
            "project": section.project,
            "workspace": section.workspace,
            "experiment_key": section.experiment_key,
            "mode": section.mode,
            "online": section.online,
        }
        self.experiment = comet.start(**{name: value for name, value in given.items() if value is not None})
        if section.experiment_name is not None:
            self.experiment.set_name(section.experiment_name)
        self._interval = section.samples_log_interval
        self._last: dict[str, int] = {}

    def write(self, events: Iterable[Event]) -> None:
        for name, value, x in events:
            if name not in self._last or x - self._last[name] >= self._interval:
                self._last[name] = x
                self.experiment.log_metric(name, value, step=x)

    def close(self) -> None:
        self.experiment.end()


class _Call:
    """A function as a writer."""

    def __init__(self, call: Callable[[str, float, int], object]) -> None:
        self._call = call

    def write(self, events: Iterable[Event]) -> None:
        for event in events:
            self._call(*event)

    def close(self) -> None: ...


# Section of the configuration -> (what writes, the package that it needs).
WRITERS: dict[str, tuple[Callable[[Any], Writer], str | None]] = {
    "tensorboard": (TensorBoard, None),
    "csv_monitor": (Csv, None),
    "wandb": (WeightsAndBiases, "wandb"),
    "comet": (Comet, "comet_ml"),
}


class Monitor:
    """The writers that a configuration switches on; without any, and on other ranks than 0, a call does nothing."""

    def __init__(self, config: _core.Config, rank: int = 0, warnings: list[tuple[str, int]] | None = None) -> None:
        """ConfigError, on all ranks, where a package is not installed that a section needs. `warnings` grow: every
        writer gets all of them, before the events that come next."""
        sections: dict[str, _Section] = {
            "tensorboard": config.tensorboard,
            "csv_monitor": config.csv_monitor,
            "wandb": config.wandb,
            "comet": config.comet,
        }
        wanted = [name for name in WRITERS if sections[name].enabled]
        missing = [(name, package) for name in wanted if (package := WRITERS[name][1]) and not _installed(package)]
        if missing:
            lines = [f"{name}.enabled needs the package {package}: pip install {package}" for name, package in missing]
            raise ConfigError("[config] " + "; ".join(lines))
        file = config.tessera.json_lines
        self.enabled = bool(wanted) or file is not None
        self.writers: dict[str, Writer] = {name: WRITERS[name][0](sections[name]) for name in wanted if rank == 0}
        if file is not None and rank == 0:
            self.writers["json"] = JsonLines(file)
        self._rank, self._warnings = rank, [] if warnings is None else warnings
        self._sent: dict[int, int] = {}  # how many warnings each writer has got
        self._failing: set[int] = set()  # writers whose file could not be written the last time
        self._calls = itertools.count()

    def on_metric(self, call: Callable[[str, float, int], object]) -> None:
        """call(name, value, x) for every event from here on, on rank 0. ConfigError for what cannot be called."""
        if not callable(call):
            raise ConfigError(f"[monitor] on_metric takes a function (name, value, x), got {type(call).__name__}")
        if self._rank == 0:
            self.writers[f"call {next(self._calls)}"] = _Call(call)

    def warn(self, text: str, x: int) -> None:
        """A warning of your own, for files of CSV and JSON."""
        self._warnings.append((text, x))
        self.send_warnings()

    def send_warnings(self) -> None:
        """Gives writers the warnings that they have not had yet."""
        for writer in list(self.writers.values()):
            warnings = self._warnings[self._sent.get(id(writer), 0) :]
            self._sent[id(writer)] = len(self._warnings)
            if (warn := getattr(writer, "warn", None)) is not None:
                for text, x in warnings:
                    self._give(writer, partial(warn, text, x))

    def write_events(self, events: Iterable[Event]) -> None:
        """Gives (name, value, x) to every writer; x counts samples. ConfigError for what is no such event. A file that
        cannot be written (IoError) is warned of once, until it can be again, and is no error."""
        self.send_warnings()
        checked = [_checked(event) for event in events]
        _core.check_metrics(checked)
        for writer in list(self.writers.values()):
            self._give(writer, partial(writer.write, checked))

    def _give(self, writer: Writer, give: Callable[[], object]) -> None:
        try:
            give()
        except IoError as error:
            if id(writer) in self._failing:
                return
            self._failing.add(id(writer))
            text = _core.missing_numbers(str(error))
            warn_user([text])
            self.warn(text, self._warnings[-1][1] if self._warnings else 0)
        else:
            self._failing.discard(id(writer))

    def close(self) -> None:
        """Ends what was opened; safe to call twice."""
        self.send_warnings()
        writers, self.writers = self.writers, {}
        for writer in writers.values():
            writer.close()


def _checked(event: object) -> Event:
    given: Any = event
    try:
        name, value, x = given
        checked = (name, float(value), int(x))
        if not isinstance(name, str):
            raise ValueError
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"[monitor] write_events takes a list of (name, number, samples), as ('Own/loss', 0.5, 640); got {event!r}"
        ) from None
    return checked


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
