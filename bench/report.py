"""Reports: NAME.json with every figure and the machine, NAME.md with the tables made from it, NAME.png where there is a
picture."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import subprocess
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

ROOT = pathlib.Path(__file__).parents[1]
QUIET = 0.15  # a probe may move by this much while a benchmark runs
PROBES = {"bandwidth": "GB/s (a*x+y)", "arithmetic": "GFLOP/s (matrices in the cache)"}  # measure.probe(): units
Probe = list[list[dict[str, float]]]  # [before, after] of each rank


@dataclass
class Goal:
    text: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def reached(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def row(self) -> list[str]:
        sign = ">=" if self.at_least else "<="
        return [self.text, f"{sign} {self.limit:g}", f"{self.value:.3g}", "yes" if self.reached else "no"]


@dataclass
class Result:
    """What a benchmark hands over. `text`: paragraphs and tables in order. `headline`: its most important figures, for
    the index."""

    text: list[str]
    data: dict[str, Any]
    goals: list[Goal] = field(default_factory=list)
    plot: Any = None  # plot(path) writes a picture
    headline: list[str] = field(default_factory=list)
    how: str = ""  # how the figures were taken, where it is not in rounds of all
    probe: Probe = field(default_factory=list)  # where the benchmark probed the machine itself


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def cell(value: dict[str, float], digits: int = 1, sign: str = "") -> str:
    """median (min-max)"""
    low, high = (f"{value[key]:{sign}.{digits}f}" for key in ("min", "max"))
    return f"{value['median']:{sign}.{digits}f} ({low}{' to ' if sign or value['min'] < 0 else '-'}{high})"


def last_level_cache() -> int | None:
    """In MiB, where Linux says."""
    sizes = pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(size.read_text().strip().removesuffix("K")) // 1024 for size in sizes), default=None)


def machine() -> dict[str, Any]:
    cpu = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            cpu = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), cpu)
    git = ["git", "-C", str(ROOT)]
    revision = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    # Reports that earlier benchmarks of the same run wrote do not count.
    changes = [*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)bench/reports"]
    changed = subprocess.run(changes, capture_output=True, text=True, check=False).stdout.strip()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "cache": last_level_cache(),
        "threads": torch.get_num_threads(),
        "versions": versions,
        "revision": revision.stdout.strip() + ("-dirty" if changed else ""),
        "date": time.strftime("%Y-%m-%d"),
    }


def moved(probe: Probe) -> float:
    """How much any probe of any rank moved, as a share."""
    pairs = [(before[kind], after[kind]) for before, after in probe for kind in before]
    return max((abs(before - after) / ((before + after) / 2) for before, after in pairs), default=0.0)


def probe_text(probe: Probe) -> str:
    if not probe:
        return "none, because nothing could be measured"
    parts = []
    for kind in probe[0][0]:
        found = "; ".join(f"{before[kind]:.1f} and {after[kind]:.1f}" for before, after in probe)
        parts.append(f"{kind} {found} {PROBES[kind]}")
    return f"before and after on each rank: {', '.join(parts)}"


def goals_data(goals: list[Goal]) -> list[dict[str, Any]]:
    return [asdict(goal) | {"reached": goal.reached} for goal in goals]


def json_text(value: Any, indent: str = "") -> str:
    """JSON in which a list or an object of plain values is one line."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    if not any(isinstance(item, (dict, list, tuple)) for item in inner):
        return json.dumps(value)
    deeper = indent + " "
    texts = [json_text(item, deeper) for item in inner]
    if isinstance(value, dict):
        texts = [f"{json.dumps(str(key))}: {text}" for key, text in zip(value, texts, strict=True)]
    lines = f",\n{deeper}".join(texts)
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n{deeper}{lines}\n{indent}{last}"


def data_of(title: str, args: Any, result: Result, probe: Probe, where: dict[str, Any]) -> dict[str, Any]:
    """What the JSON file holds."""
    return {
        "title": title,
        "benchmark": args.bench,
        "ranks": args.ranks,
        "quick": args.quick,
        "noisy": moved(probe) > QUIET,
        "machine": where,
        "command": args.command,
        "rounds": args.rounds,
        "seconds": round(time.time() - args.started),
        "probe": probe,
        "headline": result.headline,
        "goals": goals_data(result.goals),
        **result.data,
    }


def write(folder: pathlib.Path, name: str, title: str, args: Any, result: Result, probe: Probe) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    where = machine()
    if any(peer.startswith("deepspeed") for peer in args.peers) and importlib.util.find_spec("deepspeed"):
        where["versions"]["deepspeed"] = importlib.metadata.version("deepspeed")  # it may have run in other processes
    everything = data_of(title, args, result, probe, where)
    (folder / f"{name}.json").write_text(json_text(everything) + "\n")
    versions = ", ".join(f"{key} {value}" for key, value in where["versions"].items())
    cores = f"{where['cores']} cores, " + (f"{where['cache']} MiB of cache, " if where["cache"] else "")
    head = (
        f"`{args.command}` on {where['date']}, revision {where['revision']}. {where['cpu']}, {cores}"
        f"{where['threads']} thread(s) a rank; {versions}. Probes {probe_text(probe)}. "
        + (result.how or f"Medians of {args.rounds} rounds in which every engine takes its turn (min-max).")
        + f" The run took {everything['seconds'] / 60:.1f} minutes."
    )
    if args.allocator != "default":
        head += " Allocator that keeps freed memory."
    parts = [f"# {title}", head]
    if moved(probe) > QUIET:
        parts.insert(1, f"**Noisy machine: a probe moved by {moved(probe):.0%}. Read ratios only.**")
    if args.quick:
        parts.insert(1, "Quick mode: few rounds, to see that everything works.")
    parts += result.text
    if result.plot is not None:
        result.plot(folder / f"{name}.png")
        parts.append(f"![{title}]({name}.png)")
    if result.goals:
        parts.append("Goals:")
        parts.append(table(["goal", "", "measured", "reached"], [goal.row() for goal in result.goals]))
    text = "\n\n".join(parts) + "\n"
    (folder / f"{name}.md").write_text(text)
    return text
