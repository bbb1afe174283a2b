"""Loss curves of both experiments, and below them the distance of each row to the fp32 master."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from tables.modes import BASELINE, MODES
from tables.page import Results
from tables.settings import Settings

STYLES: dict[str, tuple[str, str]] = {
    "fp32": ("#b9b9b9", "-"),
    "plain": ("#222222", "-"),
    "tessera-16": ("#123f63", ":"),
    "tessera-14": ("#1b6ca8", "-"),
    "tessera-10": ("#2aa198", "-"),
    "tessera-8": ("#6a9a1f", "-"),
    "tessera-8-nearest": ("#f2c14e", "--"),
    "deepspeed": ("#8a8a8a", ":"),
    "deepspeed-low": ("#c0392b", "-"),
}


def mean_curve(seeds: dict[int, dict[str, Any]], name: str) -> list[float]:
    runs = [found[name]["losses"] for found in seeds.values()]
    return [sum(values) / len(values) for values in zip(*runs, strict=True)]


def smooth(values: list[float], width: int) -> list[float]:
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [(sums[i + 1] - sums[max(0, i + 1 - width)]) / min(i + 1, width) for i in range(len(values))]


def draw(path: Path, settings: Settings, results: Results) -> None:
    figure, grid = plt.subplots(
        2, len(settings.experiments), figsize=(11, 7), dpi=110, squeeze=False, layout="constrained", sharex="col"
    )
    for column, experiment in enumerate(settings.experiments):
        upper, lower = grid[0][column], grid[1][column]
        width = max(1, experiment.steps // 10)
        base = mean_curve(results.train[BASELINE], experiment.name)
        for key in (k for k in results.keys if k in STYLES):
            color, line = STYLES[key]
            curve = mean_curve(results.train[key], experiment.name)
            steps = range(1, len(curve) + 1)
            style: dict[str, Any] = {"color": color, "linestyle": line, "linewidth": 2.4 if key == BASELINE else 1.4}
            if line != "-":  # above the lines that it may run along
                style["zorder"] = 3
            upper.plot(steps, smooth(curve, width), label=MODES[key].label, **style)
            if key != BASELINE:
                lower.plot(steps, smooth([a - b for a, b in zip(curve, base, strict=True)], width), **style)
        lower.axhline(0, color="#222222", linewidth=0.8)
        upper.set_title(f"{experiment.name.capitalize()}, lr {experiment.lr:g}")
        lower.set_xlabel("step")
        for axes in (upper, lower):
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].set_ylabel("training loss (nats per byte)")
    grid[1][0].set_ylabel(f"difference to {MODES[BASELINE].label}")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)
    plt.close(figure)
