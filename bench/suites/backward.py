"""What an engine adds to one backward: a model so small that nothing else is left."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import torch
from measure import GATE_STEPS, difference, each_call, new_times, same_losses, together
from report import Goal, Result, cell, table
from torch import nn
from trainers import Trainer, available, build

from suites.common import starts

WIDTH = 8
LOSS, CALL, TENSOR, JOINT = "loss.backward()", "engine.backward(loss)", "out.backward(g)", "two engines, one loss"
Entry = list[Trainer]  # two of a kind, for the joint loss
Prepare = Callable[[Entry, torch.Tensor], Callable[[], object]]


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


def prepare_loss(entry: Entry, x: torch.Tensor) -> Callable[[], object]:
    return loss_of(entry[0].forward(x)).backward


def prepare_call(entry: Entry, x: torch.Tensor) -> Callable[[], object]:
    loss = loss_of(entry[0].forward(x))
    return lambda: entry[0].backward(loss)


def prepare_tensor(entry: Entry, x: torch.Tensor) -> Callable[[], object]:
    out, g = entry[0].forward(x), torch.full_like(x, 0.1)
    return lambda: out.backward(g)


def prepare_joint(entry: Entry, x: torch.Tensor) -> Callable[[], object]:
    return loss_of(entry[0].forward(x) + entry[1].forward(x)).backward


PATTERNS: dict[str, tuple[Prepare, int]] = {  # and how many of the pair take part
    LOSS: (prepare_loss, 1),
    CALL: (prepare_call, 1),
    TENSOR: (prepare_tensor, 1),
    JOINT: (prepare_joint, 2),
}


def gate(entries: list[Entry], x: torch.Tensor) -> None:
    losses: dict[str, list[float]] = {}
    for entry in entries:
        mine = losses.setdefault(entry[0].name, [])
        for _ in range(GATE_STEPS):
            start = time.perf_counter()
            loss = loss_of(entry[0].forward(x))
            entry[0].backward(loss)
            entry[0].step()
            mine.append(loss.item())
            entry[0].first_step = entry[0].first_step or time.perf_counter() - start
    same_losses(losses, {e[0].name for e in entries if e[0].trains}, 1e-3)


def run(entry: Entry, pattern: str, x: torch.Tensor, calls: int) -> float:
    prepare, used = PATTERNS[pattern]

    def finish() -> None:
        for one in entry[:used]:
            one.step()

    together()
    return each_call(lambda: prepare(entry, x), finish, calls)


def serves(entry: Entry, pattern: str) -> bool:
    """Engines with their own backward() have it timed; what an engine refuses has no figure."""
    if pattern == CALL:
        return type(entry[0]).backward is not Trainer.backward or entry[0].name.startswith("Tessera")
    return True


def bench_backward(args: argparse.Namespace) -> Result:
    torch.manual_seed(args.rank)  # own data on every rank
    x = torch.randn(WIDTH, WIDTH)
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    entries = [[build(name, copy.deepcopy(model), False) for _ in range(2)] for name in args.peers if available(name)]
    gate(entries, x)
    seconds: dict[str, dict[str, list[float]]] = {p: {} for p in PATTERNS}
    failures: list[str] = []
    calls = 20 if args.quick else 100
    for number in range(1 + args.rounds):
        for pattern in PATTERNS:
            for entry in entries:
                name = entry[0].name
                key = f"{name}: {pattern}"
                if not serves(entry, pattern) or any(f.startswith(key) for f in failures):
                    continue
                try:
                    taken = run(entry, pattern, x, calls)
                except Exception as error:
                    failures.append(f"{key}: {str(error).splitlines()[0]}")
                    continue
                if number > 0:
                    seconds[pattern].setdefault(name, []).append(taken)
    result = finish(args, seconds, failures, calls)
    result.text.append(starts({entry[0].name: new_times(entry[0]) for entry in entries}))
    return result


def finish(
    args: argparse.Namespace, seconds: dict[str, dict[str, list[float]]], failures: list[str], calls: int
) -> Result:
    plain = "autograd alone"
    seconds[CALL][plain] = seconds[LOSS][plain]
    names = list(seconds[LOSS])
    rows, data, goals = [], {}, []
    for name in names:
        cells = []
        for pattern, of in seconds.items():
            if name not in of or (name == plain and pattern == CALL):
                cells.append("-")
                continue
            value = (
                difference(of[name], of[plain], 1e6)
                if name != plain
                else difference(of[name], [0.0] * args.rounds, 1e6)
            )
            cells.append(cell(value, sign="" if name == plain else "+"))
            data[f"{name}: {pattern}"] = value
            if args.ranks == 1 and name.startswith("Tessera") and pattern in (LOSS, TENSOR):
                goals.append(Goal(f"{name}: us that {pattern} adds", value["median"], 20))
        rows.append([name, *cells])
    text = [
        f"Microseconds that the backward of a Linear({WIDTH}, {WIDTH}) takes in plain PyTorch (first row), and what "
        f"each engine adds (the limit is 0); median of {calls} calls a round. Every backward is followed by a step "
        "that is not timed. " + ("" if args.ranks == 1 else "With several ranks the reductions are in it."),
        table(["engine", *PATTERNS], rows),
    ]
    if failures:
        text.append("No figure: " + "; ".join(failures) + ".")
    own = [g for g in goals if LOSS in g.text]
    theirs = [data[f"{n}: {CALL}"]["median"] for n in names if n.startswith("DeepSpeed") and f"{n}: {CALL}" in data]
    if own and theirs:
        goals.append(
            Goal(
                "least that DeepSpeed adds, over the most that Tessera adds",
                min(theirs) / max(g.value for g in own),
                5,
                True,
            )
        )
    added = [f"{n} {data[f'{n}: {LOSS}']['median']:+.0f}" for n in names if n != plain and f"{n}: {LOSS}" in data]
    return Result(text, {"backward_us": data}, goals, headline=[f"us that {LOSS} adds: " + ", ".join(added)])
