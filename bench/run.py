"""Benchmarks of the engine against its peers, interleaved in one run.

  python bench/run.py tensors   engine cost per tensor: 10 to 10,000 tensors, 10 M parameters
  python bench/run.py step      gradient to updated weights: 10 M parameters in 50 tensors, bf16
  python bench/run.py gpt       GPT of 10 M parameters end to end, fp32 and bf16
  python bench/run.py memory    bytes a parameter, resident and peak, 60 M parameters in bf16
Add --ranks 2 for two Gloo processes, --quick for fewer rounds. Reports go to bench/reports/.
"""

from __future__ import annotations

import argparse
import gc
import os
import pathlib
import socket
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1] / "examples" / "python")]

from contenders import Contender, contenders  # noqa: E402
from gpt import Gpt, GptOptions  # noqa: E402
from measure import bandwidth, cell, interleaved, peak_memory, summary, table, write_report  # noqa: E402

PEERS = ["bare", "ddp", "tessera:0", "tessera:1", "tessera:2", "fsdp2:2", "deepspeed:1", "deepspeed:2"]
GATE_STEPS = 5


class ManyTensors(nn.Module):
    """Parameters of equal size whose gradients cost next to nothing: what is left is the engine."""

    def __init__(self, count: int, elements: int) -> None:
        super().__init__()
        size = max(1, elements // count)
        self.blocks = nn.ModuleList(
            nn.ParameterList(torch.randn(size) for _ in range(min(10, count - start))) for start in range(0, count, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for block in self.blocks:
            for param in block:
                total = total + param[:1].sum().to(x.dtype) * x
        return total.float()


class Layer(nn.Module):
    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(elements))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight[:1].sum().to(x.dtype) * x


class ManyLayers(nn.Module):
    """As ManyTensors, with a module for every parameter, so that engines can partition them."""

    def __init__(self, count: int, elements: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(elements // count) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    found: Any = getattr(model, "blocks", [])
    return [b for b in found if not isinstance(b, nn.ParameterList)]


def gate(entries: list[Contender], batch: tuple[Any, ...], tolerance: float) -> list[list[float]]:
    """Losses of the first steps; every engine must agree with the first, or there is no number."""
    losses = [[entry.train(*batch) for _ in range(GATE_STEPS)] for entry in entries]
    for entry, mine in zip(entries, losses, strict=True):
        worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(mine, losses[0], strict=True))
        if worst > tolerance:
            raise RuntimeError(f"{entry.name} trains to other losses than {entries[0].name}: {mine} and {losses[0]}")
    return losses


def timed(entries: list[Contender], batch: tuple[Any, ...], rounds: int) -> dict[str, dict[str, float]]:
    runs: dict[str, Callable[[], object]] = {e.name: (lambda e=e: e.train(*batch)) for e in entries}
    return {name: summary(seconds) for name, seconds in interleaved(runs, rounds).items()}


def bench_tensors(args: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    counts = [10, 100, 1000] if args.quick else [10, 100, 1000, 10000]
    results: dict[str, Any] = {}
    for count in counts:
        torch.manual_seed(0)
        names = [n for n in args.peers if not (n.startswith("fsdp2") and count > 1000)]
        entries = contenders(names, lambda c=count: ManyTensors(c, 10_000_000), False, 1, blocks_of)
        batch = (torch.ones(()),)
        gate(entries, batch, 1e-3)
        results[str(count)] = timed(entries, batch, 3 if count == 10000 else args.rounds)
        for entry in entries:
            entry.close()
        del entries
        gc.collect()

    def slope(name: str) -> float:
        """Milliseconds a tensor, between the largest and the smallest count that were measured."""
        measured = [c for c in counts if name in results[str(c)]]
        first, last = (results[str(c)][name]["median"] for c in (measured[0], measured[-1]))
        return (last - first) / (measured[-1] - measured[0])

    rows = []
    for name in results[str(counts[0])]:
        steps = [cell(results[str(c)][name]) if name in results[str(c)] else "-" for c in counts]
        own = slope(name) * 1e3
        base = slope("bare loop") * 1e3 if "bare loop" in results[str(counts[0])] else None
        rows.append([name, *steps, f"{own:.1f}", "-" if base is None else f"{own - base:+.1f}"])
    header = ["engine", *[f"{c} tensors, ms" for c in counts], "us a tensor (slope)", "over the bare loop"]
    return [table(header, rows)], {"tensors": results}


def bench_step(args: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    torch.manual_seed(0)
    elements = 10_000_000
    entries = contenders(args.peers, lambda: ManyTensors(50, elements), True, 1, blocks_of)
    batch = (torch.ones((), dtype=torch.bfloat16),)
    gate(entries, batch, 0.05)
    results = timed(entries, batch, args.rounds)
    traffic = 2 + 14 + 14  # norm; update of fp32 master and moments, bf16 gradient and weight
    roof = traffic * elements / bandwidth() / 1e6
    rows = [
        [name, f"{cell(r, 2)} ms", f"{r['median'] * 1e6 / elements:.2f}", f"{100 * roof / r['median']:.0f}%"]
        for name, r in results.items()
    ]
    note = "Whole step: forward and backward of almost no arithmetic, gradient hand-over, norm, clip, update, cast."
    limit = f"Limit: {traffic} B a parameter at the probed bandwidth, {roof:.2f} ms."
    return [note + " " + limit, table(["engine", "step", "ns/param", "of limit"], rows)], {"step": results}


def bench_gpt(args: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    tables, data = [], {}
    for bf16 in (False, True):
        torch.manual_seed(0)
        options = GptOptions()
        rows_in_batch = 2
        entries = contenders(args.peers, lambda o=options: Gpt(o), bf16, rows_in_batch, blocks_of)
        generator = torch.Generator().manual_seed(1)
        text = torch.randint(0, 256, (rows_in_batch, options.context + 1), generator=generator)
        batch = (text[:, :-1].contiguous(), text[:, 1:].contiguous())
        gate(entries, batch, 0.05 if bf16 else 1e-3)
        results = timed(entries, batch, args.rounds)
        bare = results.get("bare loop") or results["DDP"]
        tokens = rows_in_batch * options.context * args.ranks
        rows = [
            [n, f"{cell(r)} ms", f"{tokens / r['median'] * 1e3:.0f}", f"{r['median'] / bare['median']:.3f}"]
            for n, r in results.items()
        ]
        kind = "bf16" if bf16 else "fp32"
        base = "bare loop" if "bare loop" in results else "DDP"
        tables.append(f"{kind}, {rows_in_batch} x {options.context} tokens a rank")
        tables.append(table(["engine", "step", "tokens/s", f"time over {base}"], rows))
        data[kind] = results
        for entry in entries:
            entry.close()
        del entries
        gc.collect()
    return tables, data


def _memory_worker(rank: int, args: argparse.Namespace, port: int, name: str, queue: Any) -> None:
    setup(rank, args.ranks, port)
    elements = 60_000_000
    torch.manual_seed(0)
    before = peak_memory()
    entry = contenders([name], lambda: ManyLayers(60, elements), True, 1, blocks_of)
    if entry:
        for _ in range(3):
            entry[0].train(torch.ones((), dtype=torch.bfloat16))
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        queue.put((entry[0].name, (resident - before) / elements, (peak_memory() - before) / elements))
    dist.destroy_process_group()


def bench_memory(args: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    context = mp.get_context("spawn")
    rows, data = [], {}
    for name in args.peers:
        queue = context.SimpleQueue()
        mp.spawn(_memory_worker, (args, free_port(), name, queue), nprocs=args.ranks)
        found = []
        while not queue.empty():
            found.append(queue.get())
        if not found:
            continue
        resident, peak = max(f[1] for f in found), max(f[2] for f in found)
        rows.append([found[0][0], f"{resident:.1f}", f"{peak:.1f}"])
        data[found[0][0]] = {"resident": resident, "peak": peak}
    note = "Resident size above that before the model was made, largest rank; the peak includes construction."
    return [note, table(["engine", "B/param after 3 steps", "peak B/param"], rows)], {"memory": data}


BENCHES = {"tensors": bench_tensors, "step": bench_step, "gpt": bench_gpt, "memory": bench_memory}
TITLES = {
    "tensors": "Engine cost per tensor",
    "step": "Local step: gradient to updated weights",
    "gpt": "GPT of 10 M parameters",
    "memory": "Memory of model states, bf16 with fp32 master",
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def setup(rank: int, ranks: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def worker(rank: int, args: argparse.Namespace, port: int) -> None:
    setup(rank, args.ranks, port)
    before = bandwidth()
    tables, data = BENCHES[args.bench](args)
    data["probe"] = [before, bandwidth()]
    if rank == 0:
        report(args, tables, data)
    dist.barrier()
    os._exit(0)  # peers leave threads behind


def report(args: argparse.Namespace, tables: list[str], data: dict[str, Any]) -> None:
    spread = abs(data["probe"][0] - data["probe"][1]) / statistics.mean(data["probe"])
    if spread > 0.15:
        tables.insert(0, f"The machine was not quiet: the bandwidth probe moved by {spread:.0%}. Read ratios only.")
    ranks = f"{args.ranks} rank" + ("s" if args.ranks > 1 else "")
    command = f"python bench/run.py {args.bench} --ranks {args.ranks}" + (" --quick" if args.quick else "")
    name = f"{args.bench}-{args.ranks}"
    path = write_report(name, f"{TITLES[args.bench]}, {ranks}", command, tables, data)
    print(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peers", nargs="+", default=PEERS, help="contenders, e.g. bare ddp tessera:1 deepspeed:2")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.rounds = min(args.rounds, 4)
    if args.ranks > 1:
        args.peers = [p for p in args.peers if p != "bare"]
    if args.bench == "memory":
        torch.set_num_threads(1)
        before = bandwidth()
        tables, data = bench_memory(args)
        report(args, tables, {**data, "probe": [before, bandwidth()]})
    else:
        mp.spawn(worker, (args, free_port()), nprocs=args.ranks)


if __name__ == "__main__":
    main()
