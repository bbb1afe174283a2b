"""Gradient accumulation: several micro-steps and one update."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from limits import update_seconds
from measure import bandwidth, gate_cycles, interleaved_cycles, median, new_times, ratio, summary
from models import GPT_SIZES, elements_of, gpt
from report import Goal, Result, cell, table
from trainers import trainers

from suites.common import AUTOGRAD, base_of, close, own_specs, starts

CONTEXT = 64  # bytes a micro-step: small ones are what accumulation is for
Found = dict[int, dict[str, list[float]]]  # seconds of an update by micro-steps and engine


def batches_of(args: argparse.Namespace, size: str, micro_steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every rank and micro-step has data of its own."""
    generator = torch.Generator().manual_seed(1 + args.rank)
    context = min(CONTEXT, GPT_SIZES[size].context)
    text = torch.randint(0, 256, (micro_steps, args.rows, context + 1), generator=generator)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in text]


def measure(args: argparse.Namespace, size: str, bf16: bool) -> tuple[Found, str]:
    found: Found = {}
    first = ""
    for micro_steps in args.micro_steps:
        torch.manual_seed(0)
        entries = trainers(args.peers, lambda: gpt(size), bf16, micro_steps=micro_steps)
        batches = batches_of(args, size, micro_steps)
        gate_cycles(entries, list(batches), 0.05 if bf16 else 1e-3)
        found[micro_steps] = interleaved_cycles(entries, list(batches), args.rounds)
        first = starts({entry.name: new_times(entry) for entry in entries})
        close(entries)
    return found, f"{first}\n\n(first step: {args.micro_steps[-1]} micro-steps)"


def limits(args: argparse.Namespace, found: Found, size: str, bf16: bool) -> dict[str, dict[int, float]]:
    """Of Tessera's own: forwards and backwards of plain PyTorch, and the least that an update adds."""
    elements, speed = elements_of(gpt(size)), bandwidth() * 1e9
    return {
        name: {
            k: median(of[AUTOGRAD]) + update_seconds(bf16, spec.states, elements, spec.stage, args.ranks, speed, k)
            for k, of in found.items()
            if AUTOGRAD in of
        }
        for name, spec in own_specs(args.peers).items()
    }


def tables(args: argparse.Namespace, found: Found, least: dict[str, dict[int, float]], tokens: int) -> list[str]:
    names = list(next(iter(found.values())))
    base = base_of(names)
    rows, shares = [], []
    for name in names:
        row, share = [name], [name]
        for k, of in found.items():
            row += [f"{k * tokens / median(of[name]):.0f}", cell(ratio(of[name], of[base]), 3)]
            known = k in least.get(name, {})
            share += [cell(summary(of[name])), f"{least[name][k] / median(of[name]):.0%}" if known else "-"]
        rows.append(row)
        shares.append(share)
    header, header_ms = ["engine"], ["engine"]
    for k in found:
        header += [f"{k} micro-steps: tokens/s", f"time over {base}"]
        header_ms += [f"{k} micro-steps: ms an update", "of limit"]
    return [table(header, rows), table(header_ms, shares)]


def goals_of(args: argparse.Namespace, title: str, found: Found) -> list[Goal]:
    """The goal is set for the most micro-steps."""
    k = max(found)
    times, goals = found[k], []
    for stage in (1, 2, 3):
        own, peer = f"Tessera {stage}", f"DeepSpeed {stage}"
        if {own, peer} <= times.keys():
            value = ratio(times[peer], times[own])["median"]
            goals.append(Goal(f"{title}, {k} micro-steps: time of {peer} over {own}", value, 1.2, True))
    return goals


def bench_accumulate(args: argparse.Namespace) -> Result:
    text = [
        "An update from several micro-steps: DDP under no_sync() and FSDP2 with set_requires_gradient_sync(False) "
        "until the last, DeepSpeed and Tessera with gradient_accumulation_steps. Limit: forwards and backwards of "
        f"plain PyTorch ('{AUTOGRAD}'), norm and update at the probed bandwidth, and what the collectives must copy "
        "(stage 2 reduces after every micro-step, stage 3 gathers twice as well), with nothing hidden."
    ]
    goals: list[Goal] = []
    data: dict[str, Any] = {}
    headline = []
    for size in args.sizes:
        for precision in args.precisions or ["bf16"]:
            found, first = measure(args, size, precision == "bf16")
            tokens = args.rows * min(CONTEXT, GPT_SIZES[size].context)
            title = f"{size}, {precision}"
            least = limits(args, found, size, precision == "bf16")
            text += [f"## {title}, {args.rows} x {tokens // args.rows} tokens a rank and micro-step"]
            text += [*tables(args, found, least, tokens * args.ranks), first]
            mine = goals_of(args, title, found)
            goals += mine
            if mine:
                headline.append(f"{title}, {max(found)} micro-steps: " + shown(mine))
            data[title] = {str(k): {n: summary(seconds) for n, seconds in of.items()} for k, of in found.items()}
    return Result(text, {"accumulate_ms": data}, goals, headline=headline)


def shown(goals: list[Goal]) -> str:
    return "DeepSpeed's time over that of stages 1, 2, 3 " + ", ".join(f"{g.value:.2f}" for g in goals)
