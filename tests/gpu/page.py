"""results.json and page.md of what the stages wrote; logs.tar.gz. Renewed after every stage. Needs no torch."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Stages = dict[str, dict[str, Any]]


def collect(work: Path, runs: Stages) -> Stages:
    """`runs`: status and seconds of each stage. With what its process wrote, as far as it came."""
    found = {}
    for name, run in runs.items():
        file = work / f"{name}.json"
        found[name] = run | ({"results": json.loads(file.read_text())} if file.exists() else {})
    return found


def short(case: dict[str, Any]) -> str:
    rest = {k: v for k, v in case.items() if k not in ("ok", "seconds", "trace", "messages")}
    return str(case.get("error", rest)).replace("\n", " ")[:300]


def counts(stage: dict[str, Any]) -> tuple[int, int, int]:
    r = stage.get("results", {})
    return len(r.get("cases", {})), len(r.get("failed", [])), len(r.get("left_out", []))


def failures(stage: dict[str, Any]) -> Iterator[str]:
    r = stage.get("results", {})
    for name in r.get("failed", []):
        yield f"{name}: {short(r['cases'][name])}"


def block(title: str, lines: list[str]) -> list[str]:
    return ["", f"## {title}", "", "```", *lines, "```"] if lines else []


def details(name: str, r: dict[str, Any]) -> list[str]:
    """What a page shows of a stage beside failures."""
    cases = r.get("cases", {})
    if name.startswith("llama"):
        return block(f"{name}: {r.get('size')}", r.get("table", []))
    if name == "kernels_speed":
        shares = [f"{c['of_copy']:6.3f}  {case}" for case, c in cases.items() if "of_copy" in c]
        return block(f"kernels: shares of a copy's {r.get('copy_gb_s', 0):.0f} GB/s", shares)
    if name == "trace":
        kept = ("busy", "largest_gaps_us", "copies", "link_busy", "waits", "tessera kernels", "streams")
        return [
            line
            for case, c in cases.items()
            for line in block(f"trace: {case}", [f"{k}: {json.dumps(c[k])[:400]}" for k in kept if k in c])
        ]
    if name == "hazards":
        waits = [f"{case}: {json.dumps(c['counts'])}" for case, c in cases.items() if "counts" in c]
        return block("waits of the host", waits)
    if name == "pytests":
        tests = cases.get("tests/python", {})
        head = f"{tests.get('counts')}, {'to their end' if tests.get('whole') else 'not to their end'}"
        return block("the project's Python tests", [head, *tests.get("failed", [])[:60]]) if tests else []
    return []


def text(stages: Stages) -> str:
    lines = [
        "# Tessera on this machine",
        "",
        "| stage | status | s | cases | failed | left out |",
        "|---|---|---|---|---|---|",
    ]
    for name, stage in stages.items():
        numbers = " | ".join(str(n or "") for n in counts(stage))
        lines.append(f"| {name} | {stage['status']} | {stage['seconds']} | {numbers} |")
    bad = [f"- {name}: {failure}" for name, stage in stages.items() for failure in failures(stage)]
    whole = all(stage["status"] == "ok" for stage in stages.values())
    lines += ["", f"## Failed: {len(bad)}", "", *bad] if bad else ["", "Nothing failed."] if whole else []
    for name, stage in stages.items():
        lines += details(name, stage.get("results", {}))
    return "\n".join(lines) + "\n"


def replace(file: Path, content: str) -> None:
    scratch = file.with_name(file.name + ".new")
    scratch.write_text(content)
    scratch.replace(file)


def write(work: Path, out: Path, runs: Stages) -> str:
    """The page's text."""
    out.mkdir(parents=True, exist_ok=True)
    stages = collect(work, runs)
    replace(out / "results.json", json.dumps(stages, indent=1))
    page = text(stages)
    replace(out / "page.md", page)
    scratch = out / "logs.tar.gz.new"
    with tarfile.open(scratch, "w:gz") as tar:
        for log in sorted([*work.glob("*.log"), *work.glob("*.xml")]):
            tar.add(log, log.name)
    scratch.replace(out / "logs.tar.gz")
    return page
