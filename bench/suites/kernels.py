"""The C++ benchmark of the kernels (bench/kernels) as a report, and peers' Adam beside the library's."""

from __future__ import annotations

import argparse
import json
import subprocess
from typing import Any

from report import ROOT, Result, table

from suites import adam
from suites.kernel_rows import FP32, Row, Turns, byte_goals, counted, goals_of, parse, parse_turns

PROGRAM = ROOT / "build" / "bench" / "bench" / "kernels" / "kernels_bench"
THREADS = (1, 2)
MIN_SECONDS = {
    True: 0.02,
    False: 0.5,
}  # measured of each form at least, by quick; with probes in turns three to seven times that
TITLES = {"adam": "Adam, all forms of states", "rules": "The other rules", "elementwise": "Elementwise passes"}


def command(elements: int, quick: bool) -> list[str]:
    words = [str(PROGRAM), "--best_only", f"--elements={elements}", "--benchmark_format=json"]
    words.append(f"--benchmark_min_time={MIN_SECONDS[quick]}")
    if quick:
        words.append("--benchmark_filter=^(adam|in_turns)/")
    return words


def measure(elements: int, quick: bool) -> tuple[list[Row], list[Turns]]:
    if not PROGRAM.exists():
        raise SystemExit(
            f"{PROGRAM.relative_to(ROOT)} is not built; `make bench` builds it, or: cmake --preset bench "
            "-DPython3_EXECUTABLE=$(pwd)/.venv/bin/python && cmake --build build/bench --target kernels_bench"
        )
    done = subprocess.run(command(elements, quick), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"kernels_bench failed with code {done.returncode}: {done.stderr.strip()[-2000:]}")
    printed = json.loads(done.stdout)
    return parse(printed), parse_turns(printed)


def figures(row: Row) -> list[str]:
    return [f"{row.ns:.3f}", f"{row.size / row.ns:.1f}", f"{row.share:.0%}", f"{row.memory:.0%}"]


def group_table(rows: list[Row]) -> str:
    forms: dict[str, dict[int, Row]] = {}
    for row in rows:
        forms.setdefault(row.form, {})[row.threads] = row
    header = ["form", "B/element"]
    for threads in THREADS:
        header += [f"{counted(threads)}: ns/element", "GB/s", "of probe", "of memory"]
    lines = []
    for form, of in forms.items():
        line = [form, f"{next(iter(of.values())).size:g}"]
        for threads in THREADS:
            row = of.get(threads)
            line += figures(row) if row else ["-"] * 4
        lines.append(line)
    return table(header, lines)


def turns_table(rows: list[Row], turns: list[Turns]) -> list[str]:
    if not turns:
        return []
    sizes = {row.form: row.size for row in rows}
    header = ["form", "B/element", "over fp32"]
    for turn in turns:
        header += [f"{counted(turn.threads)}: ns/element", "over fp32"]
    lines = []
    for form in turns[0].ns:
        line = [form, f"{sizes[form]:g}", f"{sizes[form] / sizes[FP32]:.2f}"]
        for turn in turns:
            line += [f"{turn.ns[form]:.3f}", f"{turn.ns[form] / turn.ns[FP32]:.2f}"]
        lines.append(line)
    return ["Adam in forms of fewer bytes, all in turns:", table(header, lines)]


def shown(elements: int) -> str:
    return f"{elements / 1e6:g} M elements"


def bench_kernels(args: argparse.Namespace, *_: Any) -> Result:
    sizes = args.elements or ([1_000_000] if args.quick else [10_000_000, 100_000_000])
    result = Result(
        [
            "Each kernel takes turns with probes that move the same streams (read, written, or both) and do nothing "
            "else: 'of probe' of the same elements, maybe out of the cache as the kernel does, 'of memory' of as many "
            "that only memory holds by then. Both are the time of the better probe, with or without prefetch, over the "
            "kernel's in the same turn, the median of all turns; where the buffers are larger than any cache they are "
            "one. A kernel's limit, of which goals ask for a share, is its bytes over the bandwidth of memory; what "
            "runs out of the cache may exceed it, has a goal beside the probe of the same elements, too, and is bound "
            "by arithmetic there (Adam's square root and quotient alone keep the divider busy). Values are normal "
            "numbers of the sizes of training. Form: rule / where the master weights are / dtype of the moments / "
            "rounding of what is stored in 16 bits / dtype of the gradient."
        ],
        {"kernels": {}, "in_turns": {}, "adam": {}},
        how=f"Kernels: medians over at least {MIN_SECONDS[args.quick]:g} s of each. Adam of peers: medians of "
        f"{args.rounds} rounds in which all take turns (min-max).",
    )
    for elements in sizes:
        rows, turns = measure(elements, args.quick)
        result.text.append(f"## {shown(elements)}")
        for group, title in TITLES.items():
            mine = [row for row in rows if row.group == group]
            if mine:
                result.text += [f"{title} ({mine[0].table}):", group_table(mine)]
        goals, headline = goals_of(shown(elements), rows)
        result.text += turns_table(rows, turns)
        result.goals += goals + byte_goals(shown(elements), rows, turns)
        result.headline += headline
        result.data["kernels"][str(elements)] = [row.data() for row in rows]
        result.data["in_turns"][str(elements)] = {str(turn.threads): turn.ns for turn in turns}
    result.text.append("## Adam as users call it")
    result.text.append(adam.INTRO)
    for elements in sizes:
        for threads in THREADS:
            add_peers(args, result, elements, threads)
    return result


def add_peers(args: argparse.Namespace, result: Result, elements: int, threads: int) -> None:
    found = adam.run(args.peers, elements, threads, args.rounds)
    title = f"{shown(elements)}, {counted(threads)}"
    result.text += [f"{title}:", *adam.tables(found, elements)]
    result.goals += adam.goals_of(title, found)
    result.data["adam"][title] = adam.data_of(found)
    result.headline += adam.headline_of(title, found)
