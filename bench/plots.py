"""Pictures of the reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

COLORS = {"Tessera": "#1b6ca8", "FSDP2": "#b0892f", "DeepSpeed": "#8a8a8a"}
PLAIN, LIGHT = "#4a4a4a", 0.45


def color(name: str) -> str:
    return next((c for prefix, c in COLORS.items() if name.startswith(prefix)), PLAIN)


def bare_axes(axes: Any) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()  # the first engine on top


def gpt_bars(path: Path, panels: dict[str, dict[str, dict[str, float]]], base: str, ranks: int) -> None:
    """One panel per model and precision: time of a step over that of `base`, with its spread."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    height = 0.9 + 0.28 * max(len(p) for p in panels.values())
    figure, grid = plt.subplots(rows, columns, figsize=(5.2 * columns, height * rows), squeeze=False, sharex=True)
    right = max(value["max"] for panel in panels.values() for value in panel.values())
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    for axes, (title, panel) in zip(grid.flat, panels.items(), strict=False):
        names = list(panel)
        medians = [panel[n]["median"] for n in names]
        spread = [
            [max(0.0, m - panel[n]["min"]) for n, m in zip(names, medians, strict=True)],
            [max(0.0, panel[n]["max"] - m) for n, m in zip(names, medians, strict=True)],
        ]
        axes.barh(
            names, medians, xerr=spread, color=[color(n) for n in names], error_kw={"lw": 0.8, "ecolor": "#222222"}
        )
        axes.axvline(1, color="#c0392b", lw=1)
        for number, name in enumerate(names):
            axes.text(
                panel[name]["max"] + 0.01 * right, number, f"{panel[name]['median']:.2f}", va="center", fontsize=8
            )
        axes.set_title(title, fontsize=10)
        axes.set_xlim(0, right * 1.12)
        bare_axes(axes)
    for axes in grid[-1]:
        axes.set_xlabel(f"time of a step over {base} (bar: median, line: rounds)", fontsize=8)
    save(figure, path, f"GPT, {ranks} rank{'s' if ranks > 1 else ''}: shorter is faster")


def memory_bars(
    path: Path, title: str, found: dict[str, list[float]], formulas: dict[str, float | None], ranks: int
) -> None:
    """Resident and peak bytes a parameter; a mark where the formula puts the model states."""
    names = list(found)
    figure, axes = plt.subplots(figsize=(7, 1.2 + 0.36 * len(names)))
    resident = [found[n][0] for n in names]
    later = [found[n][1] for n in names]
    first = [max(found[n]) for n in names]
    colors = [color(n) for n in names]
    axes.barh(names, first, color=colors, alpha=0.25, label="peak with construction and first step")
    axes.barh(names, later, color=colors, alpha=0.55, height=0.6, label="peak of later steps")
    axes.barh(names, resident, color=colors, height=0.35, label="between steps")
    marks = [(formulas[n], i) for i, n in enumerate(names) if formulas[n] is not None]
    if marks:
        xs, ys = zip(*marks, strict=True)
        axes.scatter(xs, ys, marker="|", s=260, color="#c0392b", zorder=3, label="formula")
    for number, value in enumerate(first):
        axes.text(value + 0.01 * max(first), number, f"{resident[number]:.1f} / {value:.1f}", va="center", fontsize=8)
    axes.set_xlim(0, max(first) * 1.18)
    axes.set_xlabel("bytes a parameter (resident / highest peak)", fontsize=9)
    bare_axes(axes)
    axes.legend(
        fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16 if len(names) > 6 else -0.3), ncol=2, frameon=False
    )
    save(figure, path, f"Memory, GPT {title}, {ranks} rank{'s' if ranks > 1 else ''}")


def smooth(values: list[float], width: int) -> list[float]:
    return [sum(part) / len(part) for end in range(1, len(values) + 1) if (part := values[max(0, end - width) : end])]


def loss_curves(path: Path, panels: dict[str, dict[str, list[float]]], base: str) -> None:
    """One column per training: losses by engine, below them the distance to `base`."""
    figure, grid = plt.subplots(2, len(panels), figsize=(11, 7), dpi=110, squeeze=False, sharex="col")
    for (upper, lower), (title, curves) in zip(grid.T, panels.items(), strict=True):
        width = max(1, len(curves[base]) // 10)
        for name, curve in curves.items():
            steps = range(1, len(curve) + 1)
            dashes = "--" if "nearest" in name else ":" if "16 bytes" in name else "-"
            style: dict[str, Any] = {"linestyle": dashes, "linewidth": 2.4 if name == base else 1.4}
            apart = [a - b for a, b in zip(curve, curves[base], strict=True)]
            (line,) = upper.plot(steps, smooth(curve, width), label=name, **style)
            lower.plot(steps, smooth(apart, width), color=line.get_color(), **style)
        upper.set_title(title.capitalize(), fontsize=10)
        lower.set_xlabel("step")
        for axes in (upper, lower):
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].set_ylabel("training loss (nats per byte)")
    grid[1][0].set_ylabel(f"difference to {base}")
    grid[0][0].legend(fontsize=8, frameon=False)
    save(figure, path, "Loss by model states")


def save(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
