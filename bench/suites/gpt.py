"""GPTs end to end: the time of a step, and where it goes."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from limits import update_seconds
from measure import PHASES, Times, bandwidth, gate, interleaved, median, ratio, summaries, summary
from models import GPT_SIZES, elements_of, gpt
from report import Goal, Result, cell, table
from trainers import trainers

from suites.common import AUTOGRAD, base_of, close, own_specs, starts


def measure(args: argparse.Namespace, size: str, bf16: bool) -> dict[str, Times]:
    torch.manual_seed(0)
    entries = trainers(args.peers, lambda: gpt(size), bf16)
    # Every rank has data of its own, so that the losses show that gradients are averaged over the ranks.
    generator = torch.Generator().manual_seed(1 + args.rank)
    text = torch.randint(0, 256, (args.rows, GPT_SIZES[size].context + 1), generator=generator)
    batch = (text[:, :-1].contiguous(), text[:, 1:].contiguous())
    gate(entries, batch, 0.05 if bf16 else 1e-3)
    times = interleaved(entries, batch, args.rounds)
    close(entries)
    return times


def limits(args: argparse.Namespace, size: str, bf16: bool, times: dict[str, Times]) -> dict[str, float]:
    """Seconds, of Tessera's own: forward and backward of plain PyTorch, and the least that an update adds."""
    if AUTOGRAD not in times:
        return {}
    plain, elements, speed = median(times[AUTOGRAD].whole), elements_of(gpt(size)), bandwidth() * 1e9
    return {
        name: plain + update_seconds(bf16, spec.states, elements, spec.stage, args.ranks, speed)
        for name, spec in own_specs(args.peers).items()
        if not spec.gloo
    }


def tables(
    args: argparse.Namespace, title: str, times: dict[str, Times], tokens: int, least: dict[str, float]
) -> list[str]:
    base = base_of(times)
    rows = [
        [
            name,
            f"{cell(summary(t.whole))} ms",
            f"{tokens / median(t.whole):.0f}",
            cell(ratio(t.whole, times[base].whole), 3),
            f"{least[name] / median(t.whole):.0%}" if name in least else "-",
        ]
        for name, t in times.items()
    ]
    where = [
        [name, *(cell(summary(getattr(t, phase))) for phase in PHASES), f"{median(t.whole) * 1e3:.1f}"]
        for name, t in times.items()
    ]
    return [
        f"## {title}",
        table(["engine", "step", "tokens/s", f"time over {base}", "of limit"], rows),
        "Where the time goes, ms:",
        table(["engine", "forward", "backward", "step", "together"], where),
        starts(times),
    ]


def goals_of(args: argparse.Namespace, title: str, times: dict[str, Times]) -> list[Goal]:
    limits: list[tuple[str, str, float]]  # engine, compared with, the engine's time at most this times the other's
    if args.ranks == 1:
        limits = [("Tessera 0", "bare loop", 1.02), ("Tessera 1", "bare loop", 1.02), ("Tessera 3", "bare loop", 1.08)]
        peers = [
            ("Tessera 1", "DeepSpeed 1", 1.25),
            ("Tessera 3", "FSDP2 as ZeRO-3", 1.25),
            ("Tessera 3", "DeepSpeed 3", 1.6),
        ]
    else:
        limits = [("Tessera 2", "DDP", 0.8)]
        peers = [
            ("Tessera 2", "DeepSpeed 1", 1.5),
            ("Tessera 3", "FSDP2 as ZeRO-3", 1.9),
            ("Tessera 3", "DeepSpeed 3", 2.5),
        ]
    goals = []
    for name, other, limit in limits:
        if {name, other} <= times.keys():
            goals.append(Goal(f"{title}: time of {name} over {other}", over(times, name, other), limit))
    for name, other, limit in peers:
        if {name, other} <= times.keys():
            goals.append(Goal(f"{title}: time of {other} over {name}", over(times, other, name), limit, True))
    return goals


def over(times: dict[str, Times], name: str, other: str) -> float:
    return ratio(times[name].whole, times[other].whole)["median"]


def bench_gpt(args: argparse.Namespace) -> Result:
    text = [
        f"'{AUTOGRAD}' is forward and backward in plain PyTorch with the gradients dropped. "
        + ("" if args.ranks == 1 else "Tessera's ranks talk through shared memory where it does not say 'over Gloo', ")
        + ("" if args.ranks == 1 else "those of the others over Gloo. ")
        + "Where gradients are reduced during the backward, that is in its time; so are the "
        "gathers of stage 3 in forward and backward. Limit: forward and backward of plain PyTorch, norm and update at "
        "the probed bandwidth"
        + ("." if args.ranks == 1 else ", and what the collectives must copy, with nothing hidden.")
    ]
    goals: list[Goal] = []
    data: dict[str, Any] = {}
    bars: dict[str, dict[str, dict[str, float]]] = {}
    headline: list[str] = []
    base = ""
    for size in args.sizes:
        for precision in args.precisions or (["bf16"] if args.quick or size == "30M" else ["fp32", "bf16"]):
            times = measure(args, size, precision == "bf16")
            context = GPT_SIZES[size].context
            title = f"{size}, {precision}"
            least = limits(args, size, precision == "bf16", times)
            heading, tokens = f"{title}, {args.rows} x {context} tokens a rank", args.rows * context * args.ranks
            text += tables(args, heading, times, tokens, least)
            headline.append(headline_of(title, times, base_of(times)))
            goals += goals_of(args, title, times)
            data[title] = summaries(times)
            base = base_of(times)
            bars[title] = {name: ratio(t.whole, times[base].whole) for name, t in times.items() if name != AUTOGRAD}

    def plot(path: Any) -> None:
        from plots import gpt_bars

        gpt_bars(path, bars, base, args.ranks)

    return Result(text, {"gpt": data}, goals, plot, headline)


def headline_of(title: str, times: dict[str, Times], base: str) -> str:
    names = ("Tessera 1", "Tessera 3", "FSDP2 as ZeRO-3", "DeepSpeed 1", "DeepSpeed 3")
    found = ", ".join(f"{name} {over(times, name, base):.2f}" for name in names if name in times)
    return f"{title}, time over {base}: {found}"
