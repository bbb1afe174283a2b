"""Engine cost per tensor: one model size in ever more tensors. The slope is the cost of a tensor, and what the engine
adds is the slope over that of forward and backward alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from limits import update_seconds
from measure import Times, bandwidth, gate, interleaved, median, summaries
from models import ManyLayers, ManyTensors
from report import Goal, Result, cell, table
from torch import nn
from trainers import trainers

from suites.common import AUTOGRAD, close, own_specs, starts

Slope = dict[str, float]
Measured = dict[int, dict[str, Times]]


def slope(measured: Measured, first: int, last: int, name: str, base: str | None = None) -> Slope:
    """Microseconds a tensor between two counts, in median and in each round; less those of `base`."""

    def us(name: str) -> list[float]:
        few, many = measured[first][name].whole, measured[last][name].whole
        rounds = [(b - a) / (last - first) * 1e6 for a, b in zip(few, many, strict=True)]
        return [(median(many) - median(few)) / (last - first) * 1e6, *rounds]

    own, other = us(name), us(base) if base is not None else [0.0] * len(us(name))
    values = [a - b for a, b in zip(own, other, strict=True)]
    return {"median": values[0], "min": min(values[1:]), "max": max(values[1:])}


def measure(
    args: argparse.Namespace, counts: list[int], make: Callable[[int], nn.Module], fsdp_limit: int, zero: dict[str, Any]
) -> Measured:
    measured: Measured = {}
    for count in counts:
        torch.manual_seed(0)
        names = [n for n in args.peers if not (n.startswith("fsdp2") and count > fsdp_limit)]
        entries = trainers(names, lambda c=count: make(c), False, zero)
        batch = (torch.ones(()),)
        gate(entries, batch, 1e-3)
        measured[count] = interleaved(entries, batch, args.rounds)
        close(entries)
    return measured


def tables(measured: Measured, spans: list[tuple[int, int]]) -> list[str]:
    counts = list(measured)
    names = list(measured[counts[0]])
    rows = [
        [name, *(cell(summaries(measured[c])[name]["whole"]) if name in measured[c] else "-" for c in counts)]
        for name in names
    ]
    text = [table(["whole step, ms", *(f"{c} tensors" for c in counts)], rows)]
    for first, last in spans:
        header = [f"us a tensor, {first} to {last} tensors", "whole step", f"over {AUTOGRAD}", "over the bare loop"]
        rows = []
        for name in (n for n in names if n in measured[last]):
            cells = [cell(slope(measured, first, last, name))]
            for base in (AUTOGRAD, "bare loop"):
                known = base in measured[last] and name != base
                cells.append(cell(slope(measured, first, last, name, base), sign="+") if known else "-")
            rows.append([name, *cells])
        text.append(table(header, rows))
    return text


def limit_table(args: argparse.Namespace, measured: Measured) -> str:
    """Shares of forward and backward of plain PyTorch and the least that an update adds."""
    speed, rows = bandwidth() * 1e9, []
    for name, spec in own_specs(args.peers).items():
        row = [name]
        for times in measured.values():
            if not {name, AUTOGRAD} <= times.keys():
                row.append("-")
                continue
            least = update_seconds(False, None, args.parameters, spec.stage, args.ranks, speed)
            row.append(f"{(median(times[AUTOGRAD].whole) + least) / median(times[name].whole):.0%}")
        rows.append(row)
    return table(["whole step, of limit", *(f"{count} tensors" for count in measured)], rows)


def spans_of(counts: list[int]) -> list[tuple[int, int]]:
    """Up to 1,000 tensors (all trainers), and from there on."""
    middle = max(c for c in counts if c <= 1000)
    return [(counts[0], middle)] + ([(middle, counts[-1])] if counts[-1] > middle else [])


def finish(args: argparse.Namespace, measured: Measured, note: str, limits: dict[str, float]) -> Result:
    spans = spans_of(list(measured))
    goals = []
    for name, limit in limits.items():
        for first, last in spans:
            if {name, AUTOGRAD} <= measured[last].keys():
                value = slope(measured, first, last, name, AUTOGRAD)["median"]
                goals.append(Goal(f"{name}, {first} to {last} tensors: us a tensor over {AUTOGRAD}", value, limit))
    data = {"tensors": {str(c): summaries(t) for c, t in measured.items()}, "parameters": args.parameters}
    text = [note, *tables(measured, spans), limit_table(args, measured)]
    most = max(measured)
    text += [f"With {most} tensors:", starts(measured[most])]
    return Result(text, data, goals, headline=headline_of(measured, spans[0]))


def headline_of(measured: Measured, span: tuple[int, int]) -> list[str]:
    first, last = span
    if AUTOGRAD not in measured[last]:
        return []
    found = [
        f"{name} {slope(measured, first, last, name, AUTOGRAD)['median']:+.0f}"
        for name in measured[last]
        if name not in (AUTOGRAD, "bare loop")
    ]
    return [f"us a tensor over {AUTOGRAD}, {first} to {last} tensors: " + ", ".join(found)]


def shared_note(args: argparse.Namespace) -> str:
    clip = "norm, clip and update of every tensor" + ("" if args.ranks == 1 else ", and communication")
    return (
        f"{args.parameters / 1e6:g} M parameters in fp32. '{AUTOGRAD}' is forward and backward of the same model in "
        f"plain PyTorch with the gradients dropped: what is above it is hand-over of gradients, {clip}. Limit: "
        f"'{AUTOGRAD}', norm and update at the probed bandwidth"
        + ("." if args.ranks == 1 else ", and what the collectives must copy, with nothing hidden.")
    )


def bench_tensors(args: argparse.Namespace) -> Result:
    counts = args.counts or ([10, 300] if args.quick else [10, 100, 1000, 10000])
    measured = measure(args, counts, lambda c: ManyTensors(c, args.parameters), 1000, {})
    return finish(args, measured, shared_note(args), {"Tessera 1": 5, "Tessera 2": 5})


def bench_layers(args: argparse.Namespace) -> Result:
    counts = args.counts or ([10, 300] if args.quick else [10, 100, 1000])
    zero = {"stage3_param_persistence_threshold": 0}  # else tensors up to 100,000 elements are not partitioned at all
    measured = measure(args, counts, lambda c: ManyLayers(c, args.parameters), 1000, zero)
    note = shared_note(args) + (
        " Every tensor has a module of its own, ten modules are a block; FSDP2 shards the blocks, Tessera and "
        "DeepSpeed have their default units, and no tensor is too small to be partitioned."
    )
    if args.ranks == 1:
        note += (
            " With one rank Tessera partitions nothing, so its figure here is that of stage 2, while FSDP2 and "
            "DeepSpeed gather and release all the same; the figure of stage 3 that counts is the one at two ranks."
        )
    return finish(args, measured, note, {"Tessera 3": 15})
