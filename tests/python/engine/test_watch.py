"""What an engine tells while it trains: times of its phases, ranges of a profiler, collectives, memory, its state."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import PAIR_SPECS, Net, Pair, batch, config, engines, make, run
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import tessera

STAGES = [0, 1, 2, 3]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_phases_are_counted_and_lie_in_each_other(stage: int, world: int) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        assert set(engine.phase_seconds().values()) == {0.0} or stage == 3
        for k in range(4):
            engine(*batch(10 * rank + k)).backward()
            engine.step()
        times = {name: count for name, (_, count) in engine.core.phases().items()}
        assert times["forward"] == times["backward"] == times["step"] == 4
        seconds = engine.phase_seconds()
        assert (seconds["reduce"] > 0) == (world > 1)
        assert (seconds["gather"] > 0) == (world > 1 and stage > 0)
        assert seconds["reduce"] <= seconds["backward"] + seconds["step"]
        assert all(value > 0 for name, value in seconds.items() if name in ("forward", "backward", "step"))

    engines(make(), world, config(stage, accumulation=2), body)


@pytest.mark.parametrize("stage", STAGES)
def test_phases_end_with_an_exception(stage: int) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        x, y = batch(rank)
        with pytest.raises(RuntimeError):
            engine(x[:, :3], y)
        loss = engine(x, y)
        loss.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        before = engine.core.phases()
        engine(x, y).backward()
        engine.step()
        after = engine.core.phases()
        for name in ("forward", "backward", "step"):
            assert after[name][1] == before[name][1] + 1, name

    engines(make(), 1, config(stage), body)


@pytest.mark.parametrize("stage", STAGES)
def test_a_profiler_shows_gathers_reductions_and_updates_by_unit(stage: int) -> None:
    cfg = config(stage, tessera={"min_unit_elements": 0})

    def body(engine: tessera.Engine, rank: int) -> set[str]:
        run(engine, rank, 1)
        if rank > 0:  # the profiler listens to the whole process
            run(engine, rank, 1)
            return set()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run(engine, rank, 1)
        return {event.name for event in profile.events() if event.name.startswith("tessera::")}

    names = engines(make(), 2, cfg, body)[0]
    assert "tessera::step" in names
    for unit in ("blocks.0", "blocks.1"):
        assert any(name.startswith("tessera::reduce") and unit in name for name in names), names
        assert any(name.startswith("tessera::update") and unit in name for name in names), names
        assert any(name.startswith("tessera::gather") and unit in name for name in names) == (stage > 0), names


def lines(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.name == "tessera")


def test_the_breakdown_is_a_line_a_step(caplog: pytest.LogCaptureFixture) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        run(engine, rank, 3)

    with caplog.at_level(logging.INFO):
        engines(make(), 2, config(1, wall_clock_breakdown=True), body)
    found = [line for line in lines(caplog).splitlines() if line.startswith("time (ms)")]
    assert len(found) == 3  # of one rank
    assert "forward: " in found[0] and "of these gather: " in found[0] and "reduce: " in found[0]


@pytest.mark.parametrize("every", [None, 2])
def test_memory_is_logged_with_the_progress_line_or_every_step(
    every: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config(1, memory_breakdown=True, steps_per_print=every)
    with caplog.at_level(logging.INFO):
        engines(make(), 2, cfg, lambda engine, rank: run(engine, rank, 4))
    assert lines(caplog).count("memory (MB) | params: ") == 4 // (every or 1)


def test_the_state_is_dumped_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engines(make(), 2, config(1, dump_state=True), lambda engine, rank: None)
    assert lines(caplog).count("param group 0: ") == 1
    assert "zero_optimization.stage" in lines(caplog) and "'lr': 0.1" in lines(caplog)


def test_the_level_of_the_logger() -> None:
    logger = logging.getLogger("tessera")
    before = logger.level
    try:
        engines(make(), 1, config(0, log_level="error"), lambda engine, rank: None)
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(before)


@pytest.mark.parametrize("stage", STAGES)
def test_collectives_are_summed(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    def body(engine: tessera.Engine, rank: int) -> list[dict[str, Any]]:
        run(engine, rank, 2)
        return engine.comm_summary(show_straggler=True)

    with caplog.at_level(logging.INFO):
        found = engines(make(), 2, config(stage, comms_logger={"enabled": True, "verbose": True, "debug": True}), body)
    rows = found[0]
    ops = {row["op"] for row in rows}
    assert ({"all_reduce"} if stage == 0 else {"reduce_scatter", "all_gather"}) <= ops
    for row in rows:
        assert row["calls"] > 0 and row["total_ms"] > 0 and row["ranks"] == 2
        assert 0 <= row["straggler_ms"] <= row["total_ms"]
        if row["bytes"]:
            assert row["busbw_gbps"] > 0 and row["algbw_gbps"] > 0
    assert sum(row["calls"] for row in rows) > 0
    assert "comm op: " in lines(caplog) and "gradients of unit" in lines(caplog)
    head, *cells = lines(caplog).split("collectives\n")[1].splitlines()[: len(rows) + 1]
    assert head.split() == list(rows[0]) and len({len(line) for line in (head, *cells)}) == 1
    for row, line in zip(rows, cells, strict=True):
        assert line.split()[0] == row["op"] and f"{row['total_ms']:.3f}" in line.split()


def test_some_operations_only() -> None:
    section = {"enabled": True, "prof_all": False, "prof_ops": ["all_gather"]}

    def body(engine: tessera.Engine, rank: int) -> set[str]:
        run(engine, rank, 1)
        return {row["op"] for row in engine.comm_summary()}

    assert engines(make(), 2, config(1, comms_logger=section), body) == [{"all_gather"}] * 2
    with pytest.raises(tessera.ConfigError, match="'allgather' is no collective"):
        engines(make(), 1, config(1, comms_logger={**section, "prof_ops": ["allgather"]}), body)
    with pytest.raises(tessera.UsageError, match=r"comms_logger\.enabled"):
        engines(make(), 1, config(1), body)


def test_collectives_of_a_cut_model_are_timed_too() -> None:
    cuts = {"autotp_size": 2, "partition_config": PAIR_SPECS}
    cfg = config(1, comms_logger={"enabled": True}, tensor_parallel=cuts)

    def body(engine: tessera.Engine, rank: int) -> list[dict[str, Any]]:
        engine(torch.ones(4, 6)).backward()
        return engine.comm_summary()

    assert all(engines(make(Pair), {"tp": 2}, cfg, body))


def test_a_summary_before_anything_was_sent(caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(0, comms_logger={"enabled": True})
    with caplog.at_level(logging.INFO):
        found = engines(make(), 1, cfg, lambda engine, rank: engine.comm_summary())
    assert found == [[]] and "collectives\n(none)" in lines(caplog)


@pytest.mark.parametrize("stage", STAGES)
def test_one_forward_is_profiled(stage: int, tmp_path: Any) -> None:
    file = tmp_path / "flops.txt"
    section = {"enabled": True, "profile_step": 1, "output_file": str(file), "module_depth": 2}

    def body(engine: tessera.Engine, rank: int) -> None:
        assert engine.flops_profiler is None
        run(engine, rank, 1)
        assert engine.flops_profiler is None
        run(engine, rank, 3)
        profile = engine.flops_profiler
        assert profile is not None and not profile.started
        linear = 2 * 4 * (5 * 7 + 2 * 7 * 7 + 7 * 3)  # rows x (in x out), a multiplication and an addition each
        assert profile.get_total_flops() == linear
        assert profile.get_total_params() == sum(p.numel() for p in make(Net).parameters())

    engines(make(), 2, config(stage, flops_profiler=section), body)
    assert file.read_text().count("flops profile of step 1: Net") == 1


def test_a_profile_that_cannot_be_written_is_warned_of(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    section = {"enabled": True, "profile_step": 0, "output_file": str(tmp_path / "no folder" / "flops.txt")}
    engine, *_ = tessera.initialize(model=make(), config=config(0, flops_profiler=section))
    with pytest.warns(UserWarning, match=r"\[flops_profiler\] cannot write .*output_file .*: No such file"):
        engine(batch(0)[0]).sum().backward()
    assert capsys.readouterr().out.startswith("flops profile of step 0: Net\n  parameters ")
    engine.step()
    assert capsys.readouterr().out == ""
    engine.destroy()


def test_operations_are_counted_beside_a_profile() -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        def step() -> None:
            engine(torch.ones(4, 4)).sum().backward()
            engine.step()

        assert operations_of_a_sample(engine, step) == pytest.approx(3 * 2 * 16)
        assert engine.flops_profiler is not None and engine.flops_profiler.get_total_flops() == 4 * 2 * 16

    section = {"enabled": True, "profile_step": 0}
    engines(nn.Linear(4, 4), 1, config(0, flops_profiler=section), body)


def operations_of_a_sample(engine: tessera.Engine, step: Callable[[], Any]) -> float:
    """What count_flops() has found, of what is among the numbers."""
    seen: dict[str, float] = {}
    engine.monitor.on_metric(lambda name, value, _: seen.__setitem__(name, value))
    engine.count_flops(peak=1e12)
    for _ in range(3):
        step()
    assert seen["Train/Samples/mfu"] == pytest.approx(seen["Train/Samples/tflops"])
    return seen["Train/Samples/tflops"] * 1e12 / seen["Train/Samples/samples_per_second"]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_operations_are_those_of_a_step(accumulation: int) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        def step() -> None:
            for _ in range(accumulation):
                engine(torch.ones(4, 4)).sum().backward()
                engine.step()

        assert operations_of_a_sample(engine, step) == pytest.approx(3 * 2 * 16)

    engines(nn.Linear(4, 4), 1, config(0, accumulation=accumulation), body)


class Mixed(nn.Module):
    """Convolutions of several forms, attentions, products of activations: what torch's counter has on the CPU, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2), nn.Conv2d(4, 4, (2, 1), dilation=2, bias=False)
        )
        self.up = nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1)
        self.line = nn.Conv1d(2, 2, 3)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, image: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        up = self.up(self.conv(image)).flatten(2)
        mixed = self.attend(x, x, x)[0]
        causal = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None, :, :4], is_causal=True)
        product = torch.baddbmm(x, mixed @ mixed.mT, x) @ torch.ones(8, 8)
        return product.sum() + self.line(up).sum() + causal.sum()


def test_operations_are_those_that_torch_counts() -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        torch.manual_seed(1)
        inputs = torch.randn(4, 2, 9, 8), torch.randn(4, 5, 8)

        def step() -> None:
            engine(*inputs).backward()
            engine.step()

        with FlopCounterMode(display=False) as counter:
            make(Mixed)(*inputs)
        assert operations_of_a_sample(engine, step) == pytest.approx(3 * counter.get_total_flops() / 4)

    engines(make(Mixed), 1, config(0), body)


def test_what_cannot_be_counted_is_said() -> None:
    engine, *_ = tessera.initialize(model=nn.Embedding(4, 4), config=config(0))
    for wrong in ({"peak": 0}, {"peak": float("nan")}, {"per_sample": 0.0}, {"per_sample": 1.0, "peak": -1}):
        with pytest.raises(ValueError, match=r"\[engine\.count_flops\] .*must be > 0"):
            engine.count_flops(**wrong)
    engine.count_flops()
    engine(torch.arange(4)).sum().backward()
    with pytest.warns(UserWarning, match=r"\[engine\.count_flops\] no products .* give per_sample"):
        engine.step()


def test_memory_prints_itself_as_a_table() -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        run(engine, rank, 1)
        beside, alone = str(engine.memory()).splitlines(), str(engine.core.memory()).splitlines()
        assert beside[0].split()[-2:] == ["held", "formula"] and alone[0].split()[-1] == "held"
        assert [line.split()[0] for line in alone[:2]] == ["memory", "params"], alone
        assert set(map(len, alone)) == {46} and beside[-1] != ""

    engines(make(), 1, config(1), body)
