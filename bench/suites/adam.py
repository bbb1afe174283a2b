"""Adam alone, called from Python over one tensor: the library's kernel, DeepSpeed's CPUAdam and torch's fused AdamW."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from measure import GATE_STEPS, median, ratio, summary
from report import Goal, cell, table
from trainers import WEIGHT_DECAY, Recipe

INTRO = (
    "optimizer.step() over one tensor whose gradient is there, the threads as given: tessera.optim.FusedAdam, "
    "deepspeed.ops.adam.DeepSpeedCPUAdam and torch.optim.AdamW(fused=True). In bf16 weights and moments are bf16, "
    "rounded to nearest; the library's kernels for that are in the tables above, as only engines call them. Weights "
    "after five steps are compared first."
)
OWN = "Tessera"
OPTIONS: dict[str, Any] = {"lr": Recipe().lr, "betas": Recipe().betas, "weight_decay": WEIGHT_DECAY}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}  # of a weight, or absolute below 1; a step is 1e-3
Found = dict[str, Any]  # seconds of each round by dtype and optimizer, and what could not be built


def _tessera(param: torch.nn.Parameter) -> torch.optim.Optimizer:
    from tessera.optim import FusedAdam

    return FusedAdam([param], **OPTIONS)


def _deepspeed(param: torch.nn.Parameter) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    states = param.dtype == torch.float32
    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam([param], fp32_optimizer_states=states, **OPTIONS)
    return optimizer


def _torch(param: torch.nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param], fused=True, **OPTIONS)


MAKERS: dict[str, tuple[str, Callable[[torch.nn.Parameter], torch.optim.Optimizer]]] = {
    "tessera": (OWN, _tessera),
    "deepspeed": ("DeepSpeed CPUAdam", _deepspeed),
    "torch": ("torch fused AdamW", _torch),
}


def gate(params: dict[str, torch.nn.Parameter], dtype: torch.dtype) -> None:
    first, *others = params
    reference = params[first].detach().float()
    for name in others:
        apart = float(((params[name].detach().float() - reference) / reference.abs().clamp(min=1)).abs().max())
        if apart > TOLERANCE[dtype]:
            raise RuntimeError(
                f"{name} updates to other weights than {first}: {apart:g} apart after {GATE_STEPS} steps"
            )


def measure(peers: list[str], elements: int, dtype: torch.dtype, rounds: int, failures: list[str]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    weights, gradient = (torch.randn(elements, generator=generator).to(dtype) for _ in range(2))
    params, optimizers = {}, {}
    for peer in peers:
        if peer == "tessera" and dtype != torch.float32:
            continue
        name, make = MAKERS[peer]
        param = torch.nn.Parameter(weights.clone())
        param.grad = gradient
        try:
            optimizers[name] = make(param)
        except Exception as error:  # DeepSpeed compiles here
            failures.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        params[name] = param
        for _ in range(GATE_STEPS):
            optimizers[name].step()
    gate(params, dtype)
    seconds: dict[str, list[float]] = {name: [] for name in params}
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _worker(index: int, peers: list[str], elements: int, threads: int, rounds: int, queue: Any) -> None:
    torch.set_num_threads(threads)
    failures: list[str] = []
    found: Found = {
        name: measure(peers, elements, dtype, rounds, failures)
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    }
    queue.put(found | {"failures": sorted(set(failures))})


def run(peers: list[str], elements: int, threads: int, rounds: int) -> Found:
    """In a process of its own: libraries read the number of threads when they are loaded."""
    known = [p for p in peers if p in MAKERS and (p != "deepspeed" or importlib.util.find_spec("deepspeed"))]
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_worker, (known, elements, threads, rounds, queue), nprocs=1)
    if before is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = before
    found: Found = queue.get()
    return found


def tables(found: Found, elements: int) -> list[str]:
    rows = []
    for dtype in ("fp32", "bf16"):
        own = found[dtype].get(OWN)
        for name, seconds in found[dtype].items():
            row = [name, dtype, f"{cell(summary(seconds), 2)} ms", f"{median(seconds) * 1e9 / elements:.3f}"]
            rows.append([*row, cell(ratio(seconds, own), 2) if own and name != OWN else "-"])
    text = [table(["optimizer", "weights and moments", "step()", "ns/element", f"time over {OWN}"], rows)]
    return text + (["No figure: " + "; ".join(found["failures"]) + "."] if found["failures"] else [])


def goals_of(title: str, found: Found) -> list[Goal]:
    own = found["fp32"].get(OWN)
    if not own:
        return []
    return [
        Goal(f"{title}, fp32: time of {name} over {OWN}", ratio(seconds, own)["median"], 1, True)
        for name, seconds in found["fp32"].items()
        if name != OWN
    ]


def headline_of(title: str, found: Found) -> list[str]:
    goals = goals_of(title, found)
    names = [goal.text.partition("time of ")[2].partition(" over")[0] for goal in goals]
    shown = ", ".join(f"{name} {goal.value:.2f}" for name, goal in zip(names, goals, strict=True))
    return [f"{title}, fp32 Adam, time over {OWN}: {shown}"] if shown else []


def data_of(found: Found) -> dict[str, Any]:
    return {dtype: {name: summary(seconds) for name, seconds in found[dtype].items()} for dtype in ("fp32", "bf16")}
