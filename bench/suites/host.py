"""What an engine costs the host for each layer: blocks of layers that compute next to nothing. CPU time, so that a
neighbour who takes the processor for a while does not count."""

from __future__ import annotations

import argparse
import time
from typing import Any

import device
import torch
from measure import PHASES, Times, difference, gate, interleaved, median, summaries
from models import NarrowBlocks
from report import Goal, Result, cell, table
from trainers import trainers

from suites.common import base_of, close

FEW, MANY = 10, 60  # blocks


def measure(args: argparse.Namespace, where: str) -> dict[int, dict[str, Times]]:
    measured = {}
    for count in (FEW, MANY):
        torch.manual_seed(0)
        zero = {"stage3_param_persistence_threshold": 0}
        entries = trainers(args.peers, lambda c=count: NarrowBlocks(c).to(where), False, zero)
        batch = (torch.ones(1, 1, device=where),)
        gate(entries, batch, 1e-3)
        measured[count] = interleaved(entries, batch, args.rounds, warmup=5, clock=time.process_time)
        close(entries)
    return measured


def a_block(measured: dict[int, dict[str, Times]], name: str, phase: str) -> list[float]:
    """Seconds, in each round."""
    few, many = (getattr(measured[count][name], phase) for count in (FEW, MANY))
    return [(b - a) / (MANY - FEW) for a, b in zip(few, many, strict=True)]


def bench_host(args: argparse.Namespace) -> Result:
    where = device.default()
    measured = measure(args, where)
    names = list(measured[MANY])
    base = base_of(names)
    rows, found = [], {}
    for name in names:
        row, found[name] = [name], {}
        for phase in PHASES:
            own, other = a_block(measured, name, phase), a_block(measured, base, phase)
            over = difference(own, other, 1e6)
            found[name][phase] = {"us": median(own) * 1e6, "over": over}
            row += [f"{median(own) * 1e6:.1f}", "-" if name == base else cell(over, 1, "+")]
        rows.append(row)
    header = ["us a block", *(text for phase in PHASES for text in (phase, f"over the {base}"))]
    layers = NarrowBlocks.LAYERS
    text = [
        f"Blocks of {layers} linear layers of one element, {2 * layers} parameters, on {where}. "
        f"CPU time of the process, all its threads, of {MANY} blocks less that of {FEW}, a block: since nothing is "
        "computed, what is over the loop beside it is what the engine asks of the host.",
        table(header, rows),
    ]
    own = {n: sum(found[n][phase]["over"]["median"] for phase in PHASES) for n in names if n.startswith("Tessera")}
    goals = [Goal(f"{n}: us a block over the {base}, all three", over, 0) for n, over in own.items() if args.ranks == 1]
    headline = [f"{n} {over:+.0f} us a block over the {base}" for n, over in own.items()]
    data: dict[str, Any] = {"host": found, "blocks": {count: summaries(times) for count, times in measured.items()}}
    return Result(text, data, goals, headline=headline)
