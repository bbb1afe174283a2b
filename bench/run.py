"""Benchmarks of the engine against its peers, which take turns in one run.

  python bench/run.py step      gradient to updated weights: 10 M parameters in 50 tensors, bf16
  python bench/run.py tensors   engine cost per tensor: 10 M parameters in 10 to 10,000 tensors
  python bench/run.py layers    the same with a module for every tensor, for stage 3: 10 to 1,000 tensors
  python bench/run.py gpt       GPTs of 10 M (fp32, bf16) and 30 M (bf16) parameters end to end, and where the time goes
  python bench/run.py backward  what an engine adds to loss.backward() and its relatives
  python bench/run.py transport collectives between ranks of one host, beside Gloo; with --ranks
  python bench/run.py memory    bytes a parameter, resident and peak, 60 M parameters in bf16
Add --ranks 2 for two processes, --quick to see that everything works. A report is refused when the machine was not
quiet (a bandwidth probe before and after), unless --noisy is given.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import socket
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples" / "python")]

from measure import bandwidth  # noqa: E402
from models import GPT_SIZES  # noqa: E402
from report import QUIET, ROOT, Result, moved, write  # noqa: E402
from suites.backward import bench_backward  # noqa: E402
from suites.gpt import bench_gpt  # noqa: E402
from suites.memory import bench_memory  # noqa: E402
from suites.step import bench_step  # noqa: E402
from suites.tensors import bench_layers, bench_tensors  # noqa: E402
from suites.transport import bench_transport  # noqa: E402

OWN, PEERS = ["tessera:0", "tessera:1", "tessera:2", "tessera:3"], ["fsdp2:2", "fsdp2:3"]
DEEPSPEED = ["deepspeed:1", "deepspeed:2", "deepspeed:3"]
PLAIN = ["autograd", "bare", "ddp"]
NOT_QUICK = ["tessera:0", "tessera:2", "deepspeed:2"]
MEMORY_NOT_QUICK = ["bare", "fsdp2:2", "deepspeed:1", *NOT_QUICK]  # a process for each contender takes its time
BENCHES: dict[str, tuple[str, Any, list[str]]] = {  # title, function, contenders
    "step": ("Local step: gradient to updated weights", bench_step, PLAIN + OWN + PEERS[:1] + DEEPSPEED),
    "tensors": ("Engine cost per tensor", bench_tensors, PLAIN + OWN[:3] + PEERS[:1] + DEEPSPEED[:2]),
    "layers": ("Engine cost per tensor, stage 3", bench_layers, [*PLAIN, "tessera:3", "fsdp2:3", "deepspeed:3"]),
    "gpt": ("GPT end to end", bench_gpt, PLAIN + OWN + PEERS + DEEPSPEED),
    "backward": (
        "What an engine adds to a backward",
        bench_backward,
        [*PLAIN[:1], *PLAIN[2:], *OWN, *PEERS, *DEEPSPEED],
    ),
    "transport": ("Collectives between ranks of one host", bench_transport, ["gloo", "tessera"]),
    "memory": ("Memory of model states", bench_memory, PLAIN[1:] + OWN + PEERS + DEEPSPEED),
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def setup(rank: int, args: argparse.Namespace, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(args.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    args.rank = rank
    warnings.filterwarnings("ignore", category=FutureWarning)  # of peers' own calls
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def worker(rank: int, args: argparse.Namespace, port: int, queue: Any) -> None:
    setup(rank, args, port)
    before = bandwidth()
    result: Result = BENCHES[args.bench][1](args)
    mine = [before, bandwidth()]
    probe: list[Any] = [None] * args.ranks
    dist.all_gather_object(probe, mine)
    if rank == 0:
        queue.put(report(args, result, probe))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # peers leave threads behind


def report(args: argparse.Namespace, result: Result, probe: list[list[float]]) -> str:
    """Writes the report, or says why not."""
    if moved(probe) > QUIET and not (args.noisy or args.quick):
        shown = ", ".join(f"{before:.1f} and {after:.1f}" for before, after in probe)
        return (
            f"no report: the bandwidth probe moved by {moved(probe):.0%} while the benchmark ran ({shown}, GB/s before "
            "and after on each rank), so the machine was not quiet; run it again, or with --noisy"
        )
    ranks = f"{args.ranks} rank" + ("s" if args.ranks > 1 else "")
    tuned = "" if args.allocator == "default" else f"-{args.allocator}"
    print(
        write(args.out, f"{args.bench}-{args.ranks}{tuned}", f"{BENCHES[args.bench][0]}, {ranks}", args, result, probe)
    )
    return ""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("bench", choices=BENCHES)
    add("--ranks", type=int, default=1)
    add("--rounds", type=int, default=7, help="rounds that are counted, at least 7 without --quick")
    add("--peers", nargs="+", help="contenders, e.g. autograd bare ddp tessera:1 fsdp2:3 deepspeed:2")
    add("--parameters", type=int, default=10_000_000, help="of step, tensors and layers")
    add("--counts", type=int, nargs="+", help="numbers of tensors, of tensors and layers")
    add("--sizes", nargs="+", choices=GPT_SIZES, help="of gpt")
    add(
        "--precisions",
        nargs="+",
        choices=["fp32", "bf16"],
        help="of gpt; default: both, for 30M and in quick mode bf16 only",
    )
    add("--rows", type=int, default=1, help="sequences a rank and step, of gpt")
    add("--allocator", choices=["default", "tuned"], default="default", help="tuned: freed memory is kept")
    add("--out", type=pathlib.Path, help="folder of the report")
    add("--quick", action="store_true", help="few rounds, small sizes; the report goes to build/bench-quick")
    add("--noisy", action="store_true", help="report although the machine is not quiet")
    args = parser.parse_args()
    args.command = " ".join(["python bench/run.py", *sys.argv[1:]])
    args.out = args.out or (ROOT / "build" / "bench-quick" if args.quick else HERE / "reports")
    args.sizes = args.sizes or (["10M"] if args.quick else ["10M", "30M"])
    skipped = [] if not args.quick else MEMORY_NOT_QUICK if args.bench == "memory" else NOT_QUICK
    default = [p for p in BENCHES[args.bench][2] if p not in skipped]
    args.peers = [p for p in args.peers or default if args.ranks == 1 or p != "bare"]
    if args.quick:
        args.rounds = min(args.rounds, 3)
    elif args.rounds < 7:
        parser.error("a report needs at least 7 rounds; fewer with --quick")
    return args


def main() -> None:
    args = options()
    if args.allocator == "tuned":  # read by glibc when the ranks start
        os.environ.update(MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_=str(1 << 40), MALLOC_TOP_PAD_=str(64 << 20))
    if args.bench == "memory":
        torch.set_num_threads(1)
        before = bandwidth()
        result = bench_memory(args, setup, free_port)
        refused = report(args, result, [[before, bandwidth()]])
    else:
        queue = mp.get_context("spawn").SimpleQueue()
        mp.spawn(worker, (args, free_port(), queue), nprocs=args.ranks)
        refused = queue.get()
    if refused:
        sys.exit(refused)


if __name__ == "__main__":
    main()
