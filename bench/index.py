"""The index of a folder of reports, made from their JSON files."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from report import ROOT, table

PAGE = "README.md"
HEADER = ["report", "what", "ranks", "headline", "goals reached", "missed", "took", "revision"]


def goals_cells(goals: list[dict[str, Any]]) -> list[str]:
    """How many are reached, and those that are not with what was measured."""
    if not goals:
        return ["-", "-"]
    missed = [g for g in goals if not g["reached"]]
    texts = [f"{g['text']}: {g['value']:.3g} ({'>=' if g['at_least'] else '<='} {g['limit']:g})" for g in missed]
    return [f"{len(goals) - len(missed)} of {len(goals)}", "; ".join(texts) or "none"]


def row(name: str, data: dict[str, Any], page: bool) -> list[str]:
    """Reports of other programs lack some of the keys."""
    marks = [mark for key, mark in (("quick", "quick mode"), ("noisy", "noisy machine")) if data.get(key)]
    title = data.get("title", "-") + (f" ({', '.join(marks)})" if marks else "")
    seconds = data.get("seconds")
    return [
        f"[{name}]({name}.{'md' if page else 'json'})",
        title,
        str(data.get("ranks", "-")),
        "; ".join(data.get("headline", [])) or "-",
        *goals_cells(data.get("goals", [])),
        "-" if seconds is None else f"{seconds / 60:.1f} min",
        data.get("machine", {}).get("revision", "-"),
    ]


def index_text(folder: pathlib.Path) -> str:
    files = sorted(folder.glob("*.json"))
    rows = [row(file.stem, json.loads(file.read_text()), file.with_suffix(".md").exists()) for file in files]
    guide = pathlib.PurePath(os.path.relpath(ROOT / "docs" / "bench.md", folder)).as_posix()
    return "\n\n".join(
        [
            "# Reports",
            f"Made by `bench/run.py index` from the JSON files beside it; [how they are measured]({guide}). "
            "Every figure, its spread, the machine and the command are in the report.",
            table(HEADER, rows) + "\n",
        ]
    )


def write_index(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / PAGE
    page.write_text(index_text(folder))
    return page
