"""Monitors: what lands in their files, who writes, and packages that are not there."""

from __future__ import annotations

import csv
import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import Net, batch, config, engines, make
from tessera.monitor import JsonLines, Monitor
from torch import nn

import tessera


def loaded(**sections: Any) -> tessera.Config:
    return tessera.Config.from_dict(sections)


def rows(path: Path) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))


def test_csv_files_are_named_as_their_events_and_go_on(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    for x in (8, 16):  # two runs
        monitor = Monitor(loaded(csv_monitor=section))
        monitor.write_events([("Train/Samples/lr", 0.5, x), ("note", 1.0, x)])
        monitor.close()
    assert rows(tmp_path / "job" / "Train_Samples_lr.csv") == [["step", "lr"], ["8", "0.5"], ["16", "0.5"]]
    assert rows(tmp_path / "job" / "note.csv")[0] == ["step", "note"]


def test_lines_of_json(tmp_path: Path) -> None:
    monitor = Monitor(loaded())
    monitor.writers["json"] = JsonLines(tmp_path / "run.jsonl")
    monitor.write_events([("a", 0.1, 1), ("b", float("nan"), 2)])
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [(line["name"], line["value"], line["step"]) for line in lines] == [("a", 0.1, 1), ("b", None, 2)]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    monitor = Monitor(loaded(csv_monitor={"enabled": True, "output_path": str(tmp_path)}), rank=1)
    monitor.write_events([("a", 1.0, 1)])
    assert monitor.enabled and not list(tmp_path.iterdir())


def test_without_a_section_nothing_is_enabled() -> None:
    monitor = Monitor(loaded())
    monitor.write_events([("a", 1.0, 1)])
    assert not monitor.enabled and monitor.writers == {}


def test_two_writers_of_a_path_are_warned_of_and_a_closed_one_is_gone(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    for cfg in (loaded(csv_monitor=section), loaded(tessera={"json_lines": str(tmp_path / "run.jsonl")})):
        first = Monitor(cfg)
        with pytest.warns(UserWarning, match="writes its numbers to '.*(job|run.jsonl)' now") as caught:
            Monitor(cfg).close()
        assert [warning.filename for warning in caught] == [__file__]
        first.close()
        Monitor(cfg).close()


def test_a_full_disk_is_warned_of_once_and_the_run_goes_on(tmp_path: Path) -> None:
    cfg = config(2, tessera={"json_lines": "/dev/full"})

    def body(engine: tessera.Engine, rank: int) -> None:
        if rank == 0:
            engine.monitor.writers["other"] = JsonLines(tmp_path / "run.jsonl")
        for k in range(3):
            engine.backward(engine(*batch(10 * rank + k)))
            engine.step()
        engine.monitor.write_events([("own", 1.0, 5)])
        assert engine.global_steps == 3

    with pytest.warns(
        UserWarning, match="cannot write '/dev/full': No space left on device; the run goes on"
    ) as caught:
        engines(make(Net), 2, cfg, body)
    assert len(caught) == 1
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert ["/dev/full" in line["warning"] for line in lines if "warning" in line] == [True]
    assert {line["step"] for line in lines if line.get("name") == "Train/Samples/global_steps"} == {8, 16, 24}


def test_a_loss_that_is_not_finite_is_warned_of_once(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    cfg = config(0, steps_per_print=2, tessera={"json_lines": str(tmp_path / "run.jsonl")})
    engine = tessera.initialize(model=model, config=cfg)[0]
    with pytest.warns(UserWarning, match=r"\[engine\.step\] the loss of step 2 is nan") as caught:
        for factor in (1.0, -float("nan"), float("nan")):
            engine.backward(engine(torch.ones(1, 2)).sum() * factor)
            engine.step()
    assert len(caught) == 1 and caught[0].filename == __file__
    assert (tmp_path / "run.jsonl").read_text().count("the loss of step 2 is nan") == 1


@pytest.mark.parametrize(
    "events",
    [
        ("a", 1.0, 8),
        [("a", 1.0)],
        [("a", "high", 8)],
        [("a", torch.ones(2), 8)],
        [("a", 1.0, None)],
        [3],
    ],
    ids=str,
)
def test_what_is_no_event_is_an_error(events: Any, tmp_path: Path) -> None:
    monitor = Monitor(loaded())
    monitor.writers["json"] = JsonLines(tmp_path / "run.jsonl")
    monitor.write_events([("a", torch.tensor(1), 8)])
    before = (tmp_path / "run.jsonl").read_text()
    with pytest.raises(tessera.ConfigError, match="a list of \\(name, number, samples\\), as"):
        monitor.write_events(events)
    assert (tmp_path / "run.jsonl").read_text() == before


def test_an_event_without_a_name_is_an_error_for_functions_too(tmp_path: Path) -> None:
    seen: list[str] = []
    monitor = Monitor(loaded())
    monitor.on_metric(lambda name, *_: seen.append(name))
    with pytest.raises(tessera.ConfigError, match=r"^\[metrics\] a number \(1\.0, at 8\) has no name: give each one"):
        monitor.write_events([("a", 2.0, 8), ("", 1.0, 8)])
    assert seen == []


def test_functions_are_kept_apart_when_some_are_removed() -> None:
    monitor = Monitor(loaded())
    seen: list[str] = []
    for name in "abc":
        monitor.on_metric(lambda *_, name=name: seen.append(name))
        if name == "b":
            del monitor.writers["call 0"]
    monitor.write_events([("x", 1.0, 1)])
    assert seen == ["b", "c"]


def test_missing_packages_are_one_error_on_all_ranks() -> None:
    with mock.patch("importlib.util.find_spec", return_value=None):
        for rank in (0, 1):
            with pytest.raises(
                tessera.ConfigError, match=r"(?s)wandb\.enabled needs .*wandb.*comet\.enabled .*comet_ml"
            ):
                Monitor(loaded(wandb={"enabled": True}, comet={"enabled": True}), rank)


class Recorder:
    """Stands for a package: notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Recorder:
            self.calls.append((name, args, kwargs))
            return self

        return call


@pytest.mark.parametrize("package", ["wandb", "comet_ml"])
def test_services_get_their_settings_and_the_events(package: str) -> None:
    section: dict[str, Any]
    name, section = {
        "wandb": ("wandb", {"group": "g", "team": "t", "project": "p"}),
        "comet_ml": ("comet", {"samples_log_interval": 10, "project": "p", "experiment_name": "n", "api_key": "k"}),
    }[package]
    recorder = Recorder()
    module = types.ModuleType(package)
    module.__dict__.update({call: getattr(recorder, call) for call in ("init", "log", "finish", "start")})
    with mock.patch.dict(sys.modules, {package: module}), mock.patch("importlib.util.find_spec"):
        monitor = Monitor(loaded(**{name: {"enabled": True, **section}}))
        for x in (4, 8, 16):
            monitor.write_events([("Train/Samples/lr", 0.5, x)])
        monitor.close()
        monitor.close()
    expected: dict[str, list[Any]] = {
        "wandb": [
            ("init", (), {"project": "p", "group": "g", "entity": "t"}),
            *[("log", ({"Train/Samples/lr": 0.5},), {"step": x}) for x in (4, 8, 16)],
            ("finish", (), {}),
        ],
        "comet_ml": [
            ("start", (), {"api_key": "k", "project": "p"}),
            ("set_name", ("n",), {}),
            *[("log_metric", ("Train/Samples/lr", 0.5), {"step": x}) for x in (4, 16)],  # 10 samples apart
            ("end", (), {}),
        ],
    }
    assert recorder.calls == expected[package]


def test_tensorboard(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monitor = Monitor(loaded(tensorboard={"enabled": True, "output_path": str(tmp_path), "job_name": "job"}))
    monitor.write_events([("Train/Samples/lr", 0.5, 8)])
    monitor.writers["tensorboard"].summary_writer.add_scalar("own", 1.0, 2)
    monitor.close()
    found = reading.EventAccumulator(str(tmp_path / "job"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("Train/Samples/lr")] == [(8, 0.5)]
    assert [(e.step, e.value) for e in found.Scalars("own")] == [(2, 1.0)]


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("times", [False, True])
def test_an_engine_writes_rate_scale_and_times_over_samples(tmp_path: Path, fp16: bool, times: bool) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    cfg = config(2, accumulation=2, csv_monitor=section, wall_clock_breakdown=times)
    if fp16:
        cfg["fp16"] = {"enabled": True, "initial_scale_power": 4}

    def body(engine: tessera.Engine, rank: int) -> None:
        assert engine.monitor.enabled
        for k in range(4):
            engine.backward(engine(*batch(10 * rank + k)))
            engine.step()

    engines(make(Net), 2, cfg, body)
    names = {path.name for path in (tmp_path / "job").iterdir()}
    assert "Train_Samples_train_loss.csv" in names
    assert ("Train_Samples_loss_scale.csv" in names) == fp16
    numbers = ("grad_norm", "skipped_steps", "samples_per_second", "memory_bytes_params")
    assert {f"Train_Samples_{name}.csv" for name in numbers} <= names
    norms = rows(tmp_path / "job" / "Train_Samples_grad_norm.csv")
    assert [row[0] for row in norms[1:]] == ["16", "32"] and all(float(row[1]) > 0 for row in norms[1:])
    parts = ("forward", "backward", "backward_inner", "backward_allreduce", "step")
    for part in parts:
        assert (f"Train_Samples_elapsed_time_ms_{part}.csv" in names) == times
    assert rows(tmp_path / "job" / "Train_Samples_lr.csv") == [["step", "lr"], ["16", "0.1"], ["32", "0.1"]]


def half_trained(stage: int, accumulation: int, **more: Any) -> tessera.Engine:
    """Its bias is frozen, and in no group."""
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    cfg = config(stage, accumulation, zero_allow_untested_optimizer=True, **more)
    return tessera.initialize(model=model, optimizer=torch.optim.SGD([model.weight], 0.1), config=cfg)[0]


def begin_a_step(engine: tessera.Engine) -> None:
    engine(torch.ones(4, 4)).sum().backward()
    engine.step()


def load_elsewhere(engine: tessera.Engine, folder: Path) -> None:
    saved = half_trained(0, accumulation=2)
    begin_a_step(saved)
    saved.save_checkpoint(folder / "run")
    engine.load_checkpoint(folder / "run")


def thaw(engine: tessera.Engine, folder: Path) -> None:
    engine.module.bias.requires_grad_(True)
    begin_a_step(engine)


# What warns, at which stage, and what the warning begins with.
WARNS = [
    (load_elsewhere, 0, "[checkpoint] "),
    (thaw, 0, "[engine] 'bias': requires gradients now"),
    (lambda engine, folder: engine.save_16bit_model(folder), 3, "[engine.save_16bit_model] nothing is written"),
    (lambda engine, folder: engine.offload_states(device="none"), 1, "[engine.offload_states] device 'none'"),
]


@pytest.mark.parametrize(("call", "stage", "begins"), WARNS, ids=[row[2].split("]")[0][1:] for row in WARNS])
def test_every_warning_of_an_engine_is_in_the_files(
    call: Callable[[tessera.Engine, Path], Any], stage: int, begins: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.jsonl"
    engine = half_trained(stage, accumulation=3, tessera={"json_lines": str(file)})
    with pytest.warns(UserWarning, match=re.escape(begins)) as caught:
        call(engine, tmp_path)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["warning"][: len(begins)] for line in lines if "warning" in line] == [begins]
    assert [warning.filename for warning in caught] == [__file__]
