"""What an engine costs that has nothing to shard: stage 0, one rank, fp32, beside the loop that a user writes."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from measure import Times, difference, gate, interleaved, median, ratio, summaries, summary
from models import GPT_SIZES, gpt
from report import Goal, Result, cell, table
from trainers import build, trainers

from suites.common import close, starts

BARE, AGAIN = "bare loop", "bare loop again"
LIMIT = 2.0  # percent


def percent(own: list[float], other: list[float]) -> dict[str, float]:
    """How much longer, in percent; the range within single rounds."""
    return {key: (value - 1) * 100 for key, value in ratio(own, other).items()}


def measure(args: argparse.Namespace, size: str) -> dict[str, Times]:
    torch.manual_seed(0)
    again = build("bare", gpt(size), False)
    again.name = AGAIN
    torch.manual_seed(0)
    entries = [*trainers(args.peers, lambda: gpt(size), False), again]
    context = GPT_SIZES[size].context
    text = torch.randint(0, 256, (args.rows, context + 1), generator=torch.Generator().manual_seed(1))
    batch = (text[:, :-1].contiguous(), text[:, 1:].contiguous())
    gate(entries, batch, 1e-3)
    times = interleaved(entries, batch, args.rounds)
    close(entries)
    return times


def rows_of(times: dict[str, Times]) -> list[list[str]]:
    bare, rows = times[BARE], []
    for name, t in times.items():
        row = [name, f"{cell(summary(t.whole), 2)} ms"]
        if name == BARE:
            rows.append([*row, "-", "-", "-"])
            continue
        passes, base = ([f + b for f, b in zip(x.forward, x.backward, strict=True)] for x in (t, bare))
        row.append(cell(percent(t.whole, bare.whole), 2, "+"))
        row += [cell(difference(*pair, 1e6), 0, "+") for pair in ((passes, base), (t.step, bare.step))]
        rows.append(row)
    return rows


def bench_overhead(args: argparse.Namespace) -> Result:
    if args.ranks != 1 or "bare" not in args.peers:
        raise SystemExit("overhead compares with the bare loop, which is for one rank")
    text = [
        "Forward, backward, clipping and AdamW in fp32. The bare loop is what a user writes: clip_grad_norm_ and "
        f"torch's fused AdamW. '{AGAIN}' is the same once more: what it differs by is noise. An engine in stage 0 "
        "shards nothing, so the limit is 0%; below it lies only what its own update saves."
    ]
    goals, headline = [], []
    data: dict[str, Any] = {}
    for size in args.sizes:
        times = measure(args, size)
        header = ["engine", "step", "over the bare loop, %", "forward and backward, us", "clipping and update, us"]
        context = GPT_SIZES[size].context
        text += [f"## GPT {size}, {args.rows} x {context} tokens", table(header, rows_of(times)), starts(times)]
        data[size] = summaries(times)
        if "Tessera 0" in times:
            own = percent(times["Tessera 0"].whole, times[BARE].whole)["median"]
            goals.append(Goal(f"{size}: percent that Tessera 0 adds to the bare loop", own, LIMIT))
            headline.append(f"{size}: Tessera 0 {own:+.1f}%")
            noise = (median(times[AGAIN].whole) / median(times[BARE].whole) - 1) * 100
            headline[-1] += f" (same loop twice {noise:+.1f}%)"
    return Result(text, {"overhead": data}, goals, headline=headline)
