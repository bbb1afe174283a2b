"""The index of a folder of reports, made from their JSON files; of those that are kept as pages only, from these."""

from __future__ import annotations

import json
import os
import pathlib
import re
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


def page_row(page: pathlib.Path) -> list[str]:
    title, _, head = page.read_text().partition("\n")
    revision = re.search(r"revision ([\w-]+)", head)
    cells = [f"[{page.stem}]({page.name})", title.removeprefix("# "), *["-"] * (len(HEADER) - 3)]
    return [*cells, revision.group(1) if revision else "-"]


def index_text(folder: pathlib.Path) -> str:
    rows = {file.stem: row(file.stem, json.loads(file.read_text()), file.with_suffix(".md").exists())
            for file in folder.glob("*.json")}  # fmt: skip
    rows |= {page.stem: page_row(page) for page in folder.glob("*.md") if page.stem not in rows and page.name != PAGE}
    guide = pathlib.PurePath(os.path.relpath(ROOT / "docs" / "bench.md", folder)).as_posix()
    machines = sorted(page.parent.name for page in folder.glob(f"*/{PAGE}"))
    parts = [
        "# Reports",
        f"Made by `bench/run.py index` from the files beside it; [how they are measured]({guide}). "
        "Every figure, its spread, the machine and the command are in the report.",
    ]
    if machines:
        parts.append("By machine: " + ", ".join(f"[{name}]({name}/{PAGE})" for name in machines) + ".")
    if rows:
        parts.append(table(HEADER, [rows[name] for name in sorted(rows)]))
    return "\n\n".join(parts) + "\n"


def write_index(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / PAGE
    page.write_text(index_text(folder))
    return page
