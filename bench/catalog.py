"""The benchmarks: what each is called, runs, and compares by default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fits_trial import ENGINES
from suites.accumulate import bench_accumulate
from suites.backward import bench_backward
from suites.checkpoint import bench_checkpoint
from suites.fits import bench_fits
from suites.gpt import bench_gpt
from suites.host import bench_host
from suites.hybrid import bench_hybrid
from suites.kernels import bench_kernels
from suites.memory import bench_memory
from suites.nvme import bench_nvme
from suites.overhead import bench_overhead
from suites.parallel import bench_parallel
from suites.step import bench_step
from suites.tables import bench_tables
from suites.tensors import bench_layers, bench_tensors
from suites.transport import bench_transport

OWN, PEERS = ["tessera:0", "tessera:1", "tessera:2", "tessera:3"], ["fsdp2:2", "fsdp2:3"]
DEEPSPEED = ["deepspeed:1", "deepspeed:2", "deepspeed:3"]
PLAIN = ["autograd", "bare", "ddp"]
LOW = ["tessera:1+10", "tessera:1+8", "deepspeed:1+10"]
MEMORY_LOW = [f"{own}+{states}" for states in (10, 8) for own in OWN[1:]]
MEMORY_LOW += [*(f"{peer}+8" for peer in PEERS), "deepspeed:1+10", "deepspeed:3+10"]
EARLY = ["tessera:3+early", "tessera:3+8+early"]  # the update in the backward
OVER_GLOO = ["tessera:2+gloo", "tessera:3+gloo"]  # of several ranks
NOT_QUICK = ["tessera:0", "tessera:2", "deepspeed:2", OVER_GLOO[0]]
TABLES = ["tessera:1+16", "tessera:1", "tessera:1+10", "tessera:1+8", "tessera:1+8+nearest"]
QUICK_OWN = ["tessera:0", "tessera:2", *DEEPSPEED]  # to import DeepSpeed takes longer than the rest


@dataclass(frozen=True)
class Bench:
    title: str
    run: Callable[..., Any]
    peers: list[str]
    not_quick: list[str]  # trainers that quick mode leaves out
    sizes: tuple[list[str], list[str]] = (["10M", "30M"], ["1M"])  # of GPTs, and in quick mode
    rounds: int = 7
    rows: int = 1  # sequences of a rank and step
    alone: bool = False  # starts processes of its own


BENCHES: dict[str, Bench] = {
    "kernels": Bench(
        "Kernels beside the memory bandwidth", bench_kernels, ["tessera", "deepspeed", "torch"], [], alone=True
    ),
    "step": Bench(
        "Local step: gradient to updated weights", bench_step, PLAIN + OWN + PEERS[:1] + DEEPSPEED + LOW, NOT_QUICK
    ),
    "tensors": Bench("Engine cost per tensor", bench_tensors, PLAIN + OWN[:3] + PEERS[:1] + DEEPSPEED[:2], QUICK_OWN),
    "layers": Bench(
        "Engine cost per tensor, stage 3", bench_layers, [*PLAIN, "tessera:3", "fsdp2:3", "deepspeed:3"], QUICK_OWN
    ),
    "gpt": Bench("GPT end to end", bench_gpt, PLAIN + OWN + OVER_GLOO + PEERS + DEEPSPEED, NOT_QUICK),
    "accumulate": Bench(
        "Gradient accumulation", bench_accumulate, PLAIN + OWN[1:] + PEERS[1:] + DEEPSPEED, [*NOT_QUICK, "ddp"]
    ),
    "overhead": Bench(
        "Overhead of stage 0",
        bench_overhead,
        ["bare", "ddp", "tessera:0", "deepspeed:0"],
        [],
        (["1M", "10M"], ["1M"]),
        rounds=31,
    ),
    "backward": Bench(
        "What an engine adds to a backward",
        bench_backward,
        [*PLAIN[:1], *PLAIN[2:], *OWN, *PEERS, *DEEPSPEED],
        NOT_QUICK,
    ),
    "host": Bench(
        "Host time of a layer",
        bench_host,
        ["bare", "ddp", *(f"{own}+units" for own in OWN), "tessera:3+units+early", *PEERS, *DEEPSPEED],
        [*PEERS, *DEEPSPEED],
        rounds=31,
    ),
    "transport": Bench("Collectives between ranks of one host", bench_transport, ["gloo", "tessera"], []),
    "checkpoint": Bench(
        "Checkpoints: save, stall, load",
        bench_checkpoint,
        ["tessera:1", "torch.save", "dcp", "deepspeed:1"],
        ["deepspeed:1"],
        (["30M", "125M"], ["1M"]),
    ),
    "nvme": Bench(
        "Optimizer states on a disk",
        bench_nvme,
        ["tessera:1", "deepspeed:3", "deepspeed:1"],
        ["deepspeed:3", "deepspeed:1"],
    ),
    "fits": Bench(
        "The largest GPT in 2 GiB",
        bench_fits,
        list(ENGINES),
        [engine for engine in ENGINES if engine not in ("tessera:states", "tessera:memory")],
        alone=True,
    ),
    "memory": Bench(
        "Memory of model states",
        bench_memory,
        PLAIN[1:] + OWN + PEERS + DEEPSPEED + MEMORY_LOW + EARLY,
        [
            "bare",
            "ddp",
            "tessera:1",
            "fsdp2:2",
            *QUICK_OWN,
            *EARLY,
            *(peer for peer in MEMORY_LOW if peer != "tessera:3+10"),
        ],
        (["125M"], ["10M"]),
        alone=True,
    ),
    "hybrid": Bench(
        "Vision-language model: hybrid, tensor parallel, ZeRO-3",
        bench_hybrid,
        ["hybrid", "tensor", "zero3"],
        [],
        alone=True,
    ),
    "parallel": Bench(
        "Tensor and sequence parallelism of a Llama",
        bench_parallel,
        ["tessera", "tessera+norms", "tessera+gloo", "dtensor", "dtensor+norms", "deepspeed"],
        ["tessera+gloo", "deepspeed"],
        rounds=15,
    ),
    "tables": Bench(
        "Low-precision model states: memory, time and loss",
        bench_tables,
        ["bare", *TABLES, "deepspeed:1", "deepspeed:1+10"],
        [],
        (["3M"], ["1M"]),
        rows=2,
        alone=True,
    ),
}
