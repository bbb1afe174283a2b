"""bench/: the arithmetic behind reports, goals and the index, and the programs end to end on models of a moment."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
sys.path[:0] = [str(BENCH), str(ROOT / "examples" / "python")]

import limits  # noqa: E402
import measure  # noqa: E402
import plan  # noqa: E402
import report  # noqa: E402
import run  # noqa: E402
import torch  # noqa: E402
from catalog import BENCHES  # noqa: E402
from index import index_text, write_index  # noqa: E402
from models import gpt  # noqa: E402
from report import Goal, Result  # noqa: E402
from suites import adam, kernel_rows, kernels, memory, memory_goals, overhead, transport, transport_limits  # noqa: E402
from suites.memory_goals import Figures  # noqa: E402
from trainers import build, parse  # noqa: E402


def summary(low, median, high):
    return {"median": median, "min": low, "max": high}


# ---- figures


def test_ratio_is_of_medians_and_its_range_of_rounds():
    own, other = [2.0, 4.0, 9.0], [1.0, 4.0, 3.0]
    assert measure.ratio(own, other) == pytest.approx(summary(1.0, 4 / 3, 3.0))
    assert measure.difference(own, other, 10) == pytest.approx(summary(0.0, 10.0, 60.0))
    assert overhead.percent(own, other) == pytest.approx(summary(0.0, 100 / 3, 200.0))


def test_cells_show_the_spread():
    assert report.cell(summary(1.25, 2.0, 3.5), 2) == "2.00 (1.25-3.50)"
    assert report.cell(summary(-1.0, 0.5, 2.0), 1, "+") == "+0.5 (-1.0 to +2.0)"


def test_other_losses_are_refused():
    losses = {"a": [3.0, 2.0], "b": [3.0, 2.001], "forward": [3.0, 3.0]}
    measure.same_losses(losses, {"a", "b"}, 1e-3)  # what does not train is compared at the first step
    with pytest.raises(RuntimeError, match="b trains to other losses than a"):
        measure.same_losses(losses, {"a", "b"}, 1e-4)
    with pytest.raises(RuntimeError, match="forward"):
        measure.same_losses(losses | {"forward": [3.1, 3.0]}, {"a", "b"}, 1e-3)


@pytest.mark.parametrize(
    ("goal", "row", "reached"),
    [
        (Goal("t", 1.02, 1.02), ["t", "<= 1.02", "1.02", "yes"], True),
        (Goal("t", 1.03, 1.02), ["t", "<= 1.02", "1.03", "no"], False),
        (Goal("t", 3.0, 3, True), ["t", ">= 3", "3", "yes"], True),
        (Goal("t", 2.99, 3, True), ["t", ">= 3", "2.99", "no"], False),
    ],
)
def test_goals(goal, row, reached):
    assert goal.row() == row
    assert goal.reached is reached


def test_a_probe_that_moved():
    def found(*figures):
        return [{"bandwidth": bandwidth, "arithmetic": arithmetic} for bandwidth, arithmetic in figures]

    assert report.moved([found((10.0, 1.0), (10.0, 1.0)), found((8.0, 1.0), (12.0, 1.0))]) == pytest.approx(0.4)
    assert report.moved([found((10.0, 80.0), (10.0, 120.0))]) == pytest.approx(0.4), "whichever moved most"
    assert report.moved([found((10.0, 80.0), (10.5, 81.0))]) < report.QUIET
    assert "bandwidth 10.0 and 10.5 GB/s" in report.probe_text([found((10.0, 80.0), (10.5, 81.0))])


# ---- limits


def test_bytes_of_a_step():
    assert [limits.step_bytes(True, states) for states in (16, None, 14, 10, 8)] == [30, 28, 28, 20, 16]
    assert limits.step_bytes(False, None) == 32
    one, four = (limits.step_seconds(True, 10, 1000, 1, ranks, 1e6) for ranks in (1, 4))
    assert (one, four) == pytest.approx((0.02, 0.005))
    assert limits.step_seconds(True, 10, 1000, 0, 4, 1e6) == one  # nothing is divided


def test_bytes_of_collectives():
    assert limits.collective_bytes(3, 100, 1) == 0
    reduce, gather = 300, 400  # two ranks
    assert [limits.collective_bytes(stage, 100, 2) for stage in (0, 1, 2, 3)] == [700, 700, 700, reduce + 2 * gather]
    assert [limits.collective_bytes(stage, 100, 2, 4) for stage in (1, 2, 3)] == [700, 4 * reduce + gather, 4 * 1100]


def test_update_limit_adds_both():
    only_step = limits.step_seconds(False, None, 1000, 2, 2, 1e6)
    assert limits.update_seconds(False, None, 1000, 2, 2, 1e6) == pytest.approx(only_step + 28_000 / 2e6)


@pytest.mark.parametrize(
    ("bf16", "states", "expected"),
    [
        (False, None, [16, 4 + 4 + 4, 4 + 2 + 4, 8]),
        (True, None, [14, 4 + 5, 2 + 6, 7]),
        (True, 16, [16, 10, 9, 8]),
        (True, 10, [10, 7, 6, 5]),
        (True, 8, [8, 6, 5, 4]),
    ],
)
def test_bytes_of_states(bf16, states, expected):
    assert [limits.state_bytes(bf16, states, stage, 2) for stage in (0, 1, 2, 3)] == expected
    assert limits.state_bytes(bf16, states, 3, 1) == expected[0]
    assert [limits.gradient_bytes(bf16, stage, 2) for stage in (1, 2)] == ([2, 1] if bf16 else [4, 2])


# ---- trainers


def test_names_of_trainers():
    spec = parse("tessera:1+10")
    assert (spec.kind, spec.stage, spec.states, spec.suffix) == ("tessera", 1, 10, ", 10 bytes")
    assert parse("fsdp2:3").suffix == ""
    assert parse("tessera:2+8+nearest").label == "Tessera 2, 8 bytes, nearest"
    assert parse("tessera:3+shared").shared
    assert parse("tessera:3+gloo").label == "Tessera 3, over Gloo"
    assert parse("bare+up").label == "bare loop, ties up"


@pytest.mark.parametrize("name", BENCHES)
def test_default_trainers_exist(name):
    bench = BENCHES[name]
    # Optimizers, back ends, ways to save, places of states, layouts, ways to cut.
    if name not in ("kernels", "transport", "checkpoint", "fits", "hybrid", "parallel"):
        for peer in bench.peers:
            parse(peer)
    assert set(bench.peers) - set(bench.not_quick)


@pytest.mark.parametrize(
    "name", ["tessera", "bare:1", "fsdp2:1", "tessera:4", "tessera:1+9", "ddp+8", "deepspeed:1+8", "x"]
)
def test_unknown_trainers_are_named(name):
    with pytest.raises(SystemExit, match=name.replace("+", r"\+")):
        parse(name)


def test_a_cycle_is_one_update_with_the_mean_gradient():
    """One update from two batches: that of both in one, in a plain loop and in an engine."""
    torch.manual_seed(0)
    x, y = torch.randint(0, 256, (2, 2, 1, 64))
    entries = {}
    for name, micro_steps in (("bare", 1), ("bare", 2), ("tessera:1", 2)):
        torch.manual_seed(1)
        entries[name, micro_steps] = build(name, gpt("tiny"), False, micro_steps=micro_steps)
    whole = entries.pop(("bare", 1))
    expected = [whole.train(x.flatten(0, 1), y.flatten(0, 1)) for _ in range(3)]
    for entry in entries.values():
        assert [entry.cycle(list(zip(x, y, strict=True))) for _ in range(3)] == pytest.approx(expected, rel=1e-5)
        assert entry.construction > 0
        assert entry.first_step > 0
        entry.close()


def test_gradients_of_a_cycle_are_the_mean():
    x, y = torch.randint(0, 256, (2, 2, 1, 64), generator=torch.Generator().manual_seed(0))
    found = []
    for batches in ([(x.flatten(0, 1), y.flatten(0, 1))], list(zip(x, y, strict=True))):
        torch.manual_seed(1)
        entry = build("bare", gpt("tiny"), False, micro_steps=len(batches))
        entry.step = lambda entry=entry: found.append([param.grad.clone() for param in entry.params])
        entry.cycle(batches)
    torch.testing.assert_close(found[0], found[1])


# ---- kernels


def printed(name, ps, size, share, memory, run_type="iteration"):
    """An entry of Google Benchmark's JSON."""
    counters = {"ps_per_element": ps, "bytes_per_element": size, "%_of_probe": share, "%_of_memory": memory}
    return {"name": f"{name}/threads:2/avx512/manual_time", "run_type": run_type, **counters}


FORMS = [
    printed(kernel_rows.FULL, 280.0, 28.0, 90.0, 90.0),
    printed(kernel_rows.FP32, 300.0, 28.0, 95.0, 95.0),
    printed(kernel_rows.SMALLEST, 160.0, 14.0, 81.0, 120.0),
    printed(kernel_rows.SMALLEST.replace("/stochastic", ""), 150.0, 14.0, 90.0, 130.0),
    printed("scaled_add/bf16_to_bf16", 60.0, 6.0, 84.0, 85.0),
    printed("scaled_add_stochastic/bf16_to_bf16", 70.0, 6.0, 70.0, 72.0),
    printed("lion/fp32/fp32_states/f32_grad", 200.0, 20.0, 60.0, 97.0),
    printed("adam/fp16_alone/fp32_states/stochastic/f16_grad", 170.0, 22.0, 78.0, 80.0),
    printed("adam/fp16_alone/fp32_states/f16_grad", 140.0, 22.0, 89.7, 92.0),
    printed("adam/mean", 1.0, 1.0, 1.0, 1.0, "aggregate"),
]


def test_rows_of_the_kernels():
    rows = kernel_rows.parse({"benchmarks": FORMS})
    assert len(rows) == 9
    assert rows[2] == kernel_rows.Row(kernel_rows.SMALLEST, 2, "avx512", 0.16, 14.0, 0.81, 1.2)
    assert [row.group for row in rows] == ["adam"] * 4 + ["elementwise"] * 2 + ["rules"] + ["adam"] * 2
    with pytest.raises(ValueError, match="nothing"):
        kernel_rows.parse({"benchmarks": FORMS[-1:]})


def test_goals_of_the_kernels():
    goals, headline = kernel_rows.goals_of("10 M", kernel_rows.parse({"benchmarks": FORMS}))
    found = {goal.text.removeprefix("10 M, 2 threads: "): (goal.value, goal.reached) for goal in goals}
    share = "least share of memory's bandwidth"
    assert found == {
        f"{share}, adam (adam/fp16_alone/fp32_states/stochastic/f16_grad)": (0.8, True),
        f"{share}, rules (lion/fp32/fp32_states/f32_grad)": (0.97, True),
        f"{share}, elementwise (scaled_add_stochastic/bf16_to_bf16)": (0.72, False),
        "least share of the probe, adam (adam/fp16_alone/fp32_states/stochastic/f16_grad)": (0.78, False),
        "least share of the probe, rules (lion/fp32/fp32_states/f32_grad)": (0.6, False),
        "least share of the probe, elementwise (scaled_add_stochastic/bf16_to_bf16)": (0.7, False),
        "time of stochastic over nearest rounding (scaled_add_stochastic/bf16_to_bf16)": (pytest.approx(1.2), False),
    }
    assert headline == [f"10 M, 2 threads, {share}: adam 80%, rules 97%, elementwise 72%"]
    large = [replace(row, share=row.memory) for row in kernel_rows.parse({"benchmarks": FORMS})]
    assert not [goal for goal in kernel_rows.goals_of("1 G", large)[0] if "of the probe" in goal.text], "it is memory's"


def test_goals_of_forms_in_turns():
    ns = {kernel_rows.FP32: 300.0, kernel_rows.FULL: 280.0, kernel_rows.SMALLEST: 160.0}
    printed_turns = {"benchmarks": [*FORMS, {"name": "in_turns/threads:2/avx512/iterations:15/manual_time", **ns}]}
    rows, turns = kernel_rows.parse(printed_turns), kernel_rows.parse_turns(printed_turns)
    assert rows == kernel_rows.parse({"benchmarks": FORMS})
    assert turns == [kernel_rows.Turns(2, {form: pytest.approx(value / 1e3) for form, value in ns.items()})]
    found = {
        goal.text.removeprefix("10 M, 2 threads, in turns: "): goal
        for goal in kernel_rows.byte_goals("10 M", rows, turns)
    }
    excess = found[f"time a byte of a low-precision form over that of fp32 states ({kernel_rows.SMALLEST})"]
    gain = found["time of Adam in fp32 over all bf16 with stochastic rounding"]
    assert (excess.value, excess.reached) == (pytest.approx(160 / 280 * 2), False)
    assert (gain.value, gain.reached) == (pytest.approx(1.875), True)
    assert "| 14 | 0.50 | 0.160 | 0.53 |" in kernels.turns_table(rows, turns)[1]


def test_limits_of_the_transport():
    # Two ranks: half of the buffer stays, half goes into shared memory, half comes out of it.
    assert transport_limits.floor("all_to_all", 2, 8, one_copy=1.0, crossing=4.0) == 2.0
    assert transport_limits.floor("all_gather", 2, 8, one_copy=1.0, crossing=4.0) == 2.0
    assert transport_limits.floor("reduce_scatter", 2, 8, one_copy=1.0, crossing=4.0) == 1.5
    assert transport_limits.floor("all_reduce", 2, 8, one_copy=1.0, crossing=4.0) == 2.75  # the result twice, too
    # Read and written by who needs it.
    assert transport_limits.copy_limit("all_gather", 4, one_copy=2.0) == 2.0
    assert transport_limits.copy_limit("all_reduce", 2, one_copy=2.0) == 3.5


def test_rows_of_the_transport():
    args = argparse.Namespace(peers=["gloo", "tessera"], ranks=2)
    mib = transport_limits.MIB
    small = {"gloo": [0.8, 0.9, 1.0], "tessera": [0.1, 0.1, 0.1], "copy": [0.04, 0.05, 0.06]}
    large = {"gloo": [8.0] * 3, "tessera": [2.0] * 3, "copy": [1.0] * 3}
    found = transport.finish(args, {("all_to_all", mib): small, ("all_to_all", 64 * mib): large}, 10.0 * mib)
    entry = found.data["transport"]["all_to_all 1 MiB"]
    assert entry["limit"] == pytest.approx(100)  # 50 ms of own copies, 50 ms from the other
    assert (entry["of_limit"], entry["possible"]) == (pytest.approx(1), pytest.approx(9))
    assert found.data["transport"]["all_to_all 64 MiB"]["of_limit"] == pytest.approx(0.5)
    assert found.text[-1] == "At the limit itself the goal beside Gloo would be missed in: all_to_all 1 MiB (9.0)."
    assert [(goal.value, goal.reached) for goal in found.goals] == [
        (pytest.approx(9), False),
        (pytest.approx(4), True),
        (pytest.approx(0.5), True),
    ]


def test_a_missing_program_is_named(monkeypatch):
    monkeypatch.setattr(kernels, "PROGRAM", ROOT / "build" / "nowhere" / "kernels_bench")
    with pytest.raises(SystemExit, match="build/nowhere/kernels_bench is not built"):
        kernels.measure(1000, True)


def test_adam_of_peers():
    found = adam.run(["tessera", "torch"], 100_000, 1, 3)
    assert set(found["fp32"]) == {"Tessera", "torch fused AdamW"}
    assert set(found["bf16"]) == {"torch fused AdamW"}
    (goal,) = adam.goals_of("x", found)
    assert goal.text == "x, fp32: time of torch fused AdamW over Tessera"
    params = {"a": torch.nn.Parameter(torch.ones(3)), "b": torch.nn.Parameter(torch.ones(3) + 1e-3)}
    with pytest.raises(RuntimeError, match="b updates to other weights than a"):
        adam.gate(params, torch.float32)


# ---- memory


def figures(peer, resident, later, first, formula=0.0, kept=0.0):
    return Figures(resident, later, first, 0.0, kept=kept, formula=formula, peer=peer)


def test_goals_of_memory():
    found = {
        "DDP": figures("ddp", 16.0, 20.8, 20.0),
        "Tessera 1": figures("tessera:1", 10.0, 10.4, 10.1, 10.0, 8.0),
        "Tessera 3": figures("tessera:3", 8.0, 8.8, 8.0, 8.0, 8.0),
        "Tessera 3, 8 bytes": figures("tessera:3+8", 4.0, 4.0, 4.0, 4.0, 3.2),
        "DeepSpeed 3": figures("deepspeed:3", 10.0, 14.0, 11.0),
        "FSDP2 as ZeRO-3, 8 bytes": figures("fsdp2:3+8", 3.0, 5.0, 4.0),
    }
    default = {"DeepSpeed 3": figures("deepspeed:3", 10.0, 12.0, 20.0)}
    goals = {goal.text: goal.value for goal in memory_goals.goals_of("125M", found, default)}
    assert goals == pytest.approx(
        {
            "125M: after the steps over what is kept (stage 1)": 1.25,
            "125M: peak of later steps over formula (stage 3)": 1.1,
            "125M, 8 bytes: after the steps over what is kept (stage 3)": 1.25,
            "125M: highest peak, of Tessera 1, over that of DDP": 0.5,
            "125M, 8 bytes: peak of later steps over formula (stage 3)": 1.0,
            "125M: peak of Tessera 3 over that of DeepSpeed 3": 8.8 / 14,  # the better allocator
            "125M: peak of Tessera 3, 8 bytes over that of FSDP2 as ZeRO-3, 8 bytes": 0.8,
        }
    )


def test_the_rank_with_the_most_counts():
    most = figures("a", 1.0, 5.0, 2.0).most(figures("a", 3.0, 4.0, 1.0))
    assert (most.resident, most.later, most.first) == (3.0, 5.0, 2.0)


def test_activations_are_what_autograd_keeps(monkeypatch):
    """fp32 of two linear layers: input, and what lies between them; not the weights."""

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 4, bias=False)

        def forward(self, x, _):
            return self.b(self.a(x)).sum()

    x = torch.ones(3, 8)
    monkeypatch.setattr(memory, "gpt", lambda size: Two())
    monkeypatch.setattr(memory, "batch_of", lambda size: (x, x))
    assert memory.activations("any", False) == 4 * (x.numel() + 3 * 16)


# ---- index and plan


def report_arguments(**others):
    started = report.time.time() - 90
    common = {"bench": "gpt", "ranks": 2, "command": "c", "rounds": 7, "allocator": "default", "peers": [], "tag": ""}
    return argparse.Namespace(**common, started=started, **others)


def test_a_report_of_a_noisy_machine_is_kept_apart(monkeypatch, tmp_path):
    apart, reports = tmp_path / "apart", tmp_path / "reports"
    monkeypatch.setattr(run, "NOISY", apart)
    result = Result(["text"], {"gpt": {}}, [Goal("fast", 1.5, 1)])
    probe = [[{"bandwidth": 10.0, "arithmetic": 1.0}, {"bandwidth": 13.0, "arithmetic": 1.0}]]
    args = report_arguments(quick=False, noisy=False, out=reports)
    refusal = run.report(args, result, probe)
    assert "no report: a probe moved by 26%" in refusal
    assert refusal.endswith(f"What was measured: {apart / 'gpt-2'}.md")
    assert "**Noisy machine: a probe moved by 26%." in (apart / "gpt-2.md").read_text()
    assert not reports.exists()
    args.noisy = True
    assert not run.report(args, result, probe)
    assert sorted(path.name for path in reports.iterdir()) == ["README.md", "gpt-2.json", "gpt-2.md"]


def test_index(tmp_path):
    args = report_arguments(quick=True)
    goals = [Goal("fast", 1.5, 1), Goal("small", 1, 2)]
    result = Result(["text"], {"gpt": {}}, goals, headline=["a 1.0", "b 2.0"])
    report.write(tmp_path, "gpt-2", "GPT, 2 ranks", args, result, [[{"bandwidth": 10.0}, {"bandwidth": 20.0}]])
    (tmp_path / "other-1.json").write_text(json.dumps({"machine": {"revision": "abc"}}))
    lines = [line for line in index_text(tmp_path).splitlines() if line.startswith("| [")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][:4] == ["[gpt-2](gpt-2.md)", "GPT, 2 ranks (quick mode, noisy machine)", "2", "a 1.0; b 2.0"]
    assert cells[0][4:7] == ["1 of 2", "fast: 1.5 (<= 1)", "1.5 min"]
    assert cells[1] == ["[other-1](other-1.json)", *["-"] * 6, "abc"]


def test_index_of_pages_and_folders(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "step-1.md").write_text(
        "# Step, 1 rank\n\n`command` on a day, revision abc-dirty. A machine.\n"
    )
    page = write_index(tmp_path / "old")
    assert "| [step-1](step-1.md) | Step, 1 rank | - | - | - | - | - | abc-dirty |" in page.read_text()
    assert index_text(tmp_path / "old") == page.read_text(), "the index is no report"
    assert index_text(tmp_path).endswith("\n\nBy machine: [old](old/README.md).\n")


def test_json_has_plain_values_in_one_line():
    value = {"a": {"median": 1.5, "min": 1}, "b": [[{"c": None}], []], "3": "text", "empty": {}}
    text = report.json_text(value)
    assert json.loads(text) == value
    assert ' "a": {"median": 1.5, "min": 1},' in text.splitlines()


def test_the_plan_runs_every_benchmark():
    for lines in (plan.FULL, plan.QUICK):
        assert {line.split()[0] for line in lines} == set(BENCHES)
        assert len(lines) == len(set(lines))


def test_a_failed_benchmark_does_not_stop_the_others(monkeypatch, capfd, tmp_path):
    seen, failing = [], ["step"]

    def run(command, check):
        seen.append(command[2:])
        return subprocess.CompletedProcess(command, 1 if command[2] in failing else 0)

    monkeypatch.setattr(plan.subprocess, "run", run)
    args = argparse.Namespace(quick=True, noisy=False, rounds=None, folder=None, out=tmp_path)
    assert plan.run_all(args) == "no report: step"
    assert [" ".join(words[:-1]) for words in seen] == plan.QUICK
    assert all(words[-1] == "--quick" for words in seen)
    failing.clear()
    assert plan.run_all(args) is None, "the exit status is then 0; sys.exit('') means 1"


# ---- the program


def run_program(out, *arguments):
    command = [sys.executable, BENCH / "run.py", *arguments, "--quick", "--noisy", "--out", out]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_overhead_end_to_end(tmp_path):
    done = run_program(tmp_path, "overhead", "--sizes", "tiny", "--peers", "bare", "tessera:0", "--tag", "try")
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "overhead-1-try.json").read_text())
    assert set(data["overhead"]["tiny"]) == {"bare loop", "Tessera 0", "bare loop again"}
    assert data["overhead"]["tiny"]["Tessera 0"]["construction"] > 0
    ((before, after),) = data["probe"]
    assert before.keys() == after.keys() == {"bandwidth", "arithmetic"}
    (goal,) = data["goals"]
    assert goal["reached"] == (goal["value"] <= 2)
    assert "[overhead-1-try](overhead-1-try.md)" in (tmp_path / "README.md").read_text()


def test_accumulate_end_to_end(tmp_path):
    peers = ["autograd", "ddp", "tessera:1", "tessera:2+10", "tessera:3"]
    arguments = ["accumulate", "--ranks", "2", "--sizes", "tiny", "--micro-steps", "1", "3", "--peers", *peers]
    done = run_program(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "accumulate-2.json").read_text())
    assert set(data["accumulate_ms"]["tiny, bf16"]) == {"1", "3"}
    assert "Tessera 2, 10 bytes" in data["accumulate_ms"]["tiny, bf16"]["3"]
    assert "of limit" in (tmp_path / "accumulate-2.md").read_text()


def test_parallel_end_to_end(tmp_path):
    done = run_program(tmp_path, "parallel", "--ranks", "2", "--precisions", "fp32", "bf16")
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "parallel-2.json").read_text())
    own = "Tessera AutoTP, sequence-parallel norms"
    assert {"Tessera AutoTP", own, "DTensor plans"} < set(data["parallel"]["tensor parallel, fp32"])
    bytes_sent = [goal for goal in data["goals"] if "bytes" in goal["text"]]
    assert len(bytes_sent) == 4 and all(goal["value"] == 1 for goal in bytes_sent)
    with pytest.raises(SystemExit, match="add --ranks 2"):
        BENCHES["parallel"].run(argparse.Namespace(ranks=1))


def run_with_memory(script: str) -> None:
    """In a process of its own, which knows the module `memory`."""
    start = f"import sys; sys.path.insert(0, {str(BENCH.parent / 'examples' / 'python')!r}); import memory\n"
    done = subprocess.run([sys.executable, "-c", start + script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_memory_held_is_without_files(tmp_path):
    script = f"""
import mmap
def grown(call):
    before = memory.now(), memory.held()
    keep = call()
    return [b - a for a, b in zip(before, (memory.now(), memory.held()))], keep
def read():
    with open({str(tmp_path / "file")!r}, "w+b") as file:
        file.write(bytes(8 << 20))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 8 << 20, prot=mmap.PROT_READ)
    for page in range(0, 8 << 20, 4096):
        mapped[page]
    return mapped
(now, held), keep = grown(read)
assert now > 6 << 20 > 2 << 20 > held, (now, held)
(now, held), more = grown(lambda: bytearray(b"x") * (8 << 20))
assert min(now, held) > 7 << 20, (now, held)
"""
    run_with_memory(script)


def test_memory_of_others_is_their_part_of_shared_memory():
    script = """
import mmap, os
shared = mmap.mmap(-1, 8 << 20)
shared.write(bytes(8 << 20))
assert memory.of_others() == 0, memory.of_others()
(ready, tell), (wait, done) = os.pipe(), os.pipe()
if os.fork() == 0:
    for page in range(0, 8 << 20, 4096):
        shared[page]
    os.write(tell, b"x")
    os.read(wait, 1)
    os._exit(0)
os.read(ready, 1)
assert memory.of_others() == 4 << 20, memory.of_others()
os.write(done, b"x")
"""
    run_with_memory(script)


def test_memory_end_to_end(tmp_path):
    done = run_program(tmp_path, "memory", "--sizes", "1M", "--peers", "tessera:0", "tessera:1+8")
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "memory-1.json").read_text())
    found = data["memory"]["1M, bf16"]
    assert found["Tessera 0"]["formula"] >= 14
    # Between steps, when gradients have no memory.
    assert found["Tessera 0"]["resident"] > found["Tessera 1, 8 bytes"]["resident"] > 6
    assert (tmp_path / "memory-1.png").read_bytes().startswith(b"\x89PNG")


def test_too_few_rounds_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "overhead", "--rounds", "3"])
    with pytest.raises(SystemExit, match="2"):
        run.options()
    assert "at least 7 rounds" in capsys.readouterr().err
