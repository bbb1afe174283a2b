"""bench hybrid: the cost model, and a tiny run end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from suites import hybrid_cost  # noqa: E402
from suites.hybrid_cost import HYBRID, UNIFORM, ZERO3, Cost, Rates, Sizes, Step, cost, fit, idle  # noqa: E402

SMALL = Sizes(2, 8, 16, 1, 16, 3, 12, 24, 0.5, 20)


def test_parameters_of_the_model_that_was_published():
    assert hybrid_cost.QWEN_32B.vision == pytest.approx(0.67e9, rel=0.05)
    assert hybrid_cost.QWEN_32B.text == pytest.approx(32e9, rel=0.05)


def test_bytes_by_hand():
    """Two ranks, one picture of 64 patches and 4 words, fp32."""
    step = Step(SMALL, 2, 1, 64, 4)
    patches, tokens, images = 64 * 8 * 4, 20 * 12 * 4, 16 * 12 * 4
    text = 4 * 3 * tokens  # an all-reduce sends 2 * 1/2 of its size; 4 a layer
    assert cost(UNIFORM, step).sent == text + 4 * 2 * patches + images + patches
    exchanges = 2 * 4 * 2 * patches / 2 / 2
    assert cost(HYBRID, step).sent == text + exchanges + SMALL.vision * 4 + images / 2 + images
    assert cost(ZERO3, step).sent == 2 / 2 * (SMALL.vision + SMALL.text) * 4
    wide = replace(SMALL, text_inner=10_000)  # three weights of 120000 a layer
    sent = cost(ZERO3, replace(step, sizes=wide)).sent
    assert sent == (wide.vision + wide.text) * 4 + 3 * 3 * 120_000 * 4 / 2
    assert cost(HYBRID, step).flops == cost(UNIFORM, step).flops == cost(ZERO3, step).flops


def test_a_fit_finds_the_rates():
    rates = Rates(0.1, 2e-9, 0.0, 3e-9)
    costs = [Cost(a * 1e8, b * 1e7, c * 1e8) for a, b, c in [(1, 5, 2), (2, 1, 9), (7, 3, 4), (3, 8, 1), (9, 2, 2)]]
    found = fit(costs, [rates.seconds(c) for c in costs])
    assert [found.step, found.flop, found.sent, found.touched] == pytest.approx([0.1, 2e-9, 0.0, 3e-9], abs=1e-14)


def test_bubbles():
    assert idle(1, 1.0, 1.0, 2) == (1, pytest.approx(0.5))  # one after the other
    assert idle(4, 1.0, 1.0, 2) == (1, pytest.approx(0.2))
    assert idle(10000, 1.0, 3.0, 4) == (1, pytest.approx(0, abs=1e-3))
    assert idle(10000, 1.0, 3.0, 2) == (1, pytest.approx(1 / 3, rel=0.01))  # the faster one waits


def test_published_figures():
    """Hybrid is a prediction: within a third of what was published, and always faster than tensor parallel."""
    for row in hybrid_cost.published_rows():
        published, predicted = float(row[5]), float(row[6])
        assert predicted == pytest.approx(published, rel=1 / 3)
        assert float(row[8]) > 1


def test_end_to_end(tmp_path):
    pytest.importorskip("transformers")
    command = [sys.executable, BENCH / "run.py", "hybrid", "--ranks", "2", "--rounds", "1", "--quick", "--noisy"]
    done = subprocess.run([*command, "--out", tmp_path], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "hybrid-2.json").read_text())
    assert data["hybrid"].keys() == {f"{layout} 112" for layout in (HYBRID, UNIFORM, ZERO3)}
    bytes_goal = next(goal for goal in data["goals"] if goal["text"].startswith("bytes sent"))
    assert bytes_goal["reached"], bytes_goal
