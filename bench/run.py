"""Benchmarks of the engine against its peers, which take turns in one run.

Add --ranks 2 for two processes, --quick to see that everything works. When the machine was not quiet (probes of
bandwidth and arithmetic before and after) the report goes to build/bench-noisy and the exit status is 1, unless
--noisy is given.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples" / "python")]

import device  # noqa: E402
from catalog import BENCHES  # noqa: E402
from index import write_index  # noqa: E402
from measure import probe as probe_machine  # noqa: E402
from models import GPT_SIZES  # noqa: E402
from plan import run_all  # noqa: E402
from report import QUIET, ROOT, Probe, Result, moved, probe_text, write  # noqa: E402
from tessera.distributed import free_port  # noqa: E402

ALL, INDEX = "all", "index"
OF_MACHINES = ("--disk", "--out")  # options whose folders a report does not name
NOISY = ROOT / "build" / "bench-noisy"


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
    before = probe_machine()
    result: Result = BENCHES[args.bench].run(args)
    mine = [before, probe_machine()]
    probe: list[Any] = [None] * args.ranks
    dist.all_gather_object(probe, mine)
    if rank == 0:
        queue.put(report(args, result, probe))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # peers leave threads behind


def report(args: argparse.Namespace, result: Result, probe: Probe) -> str:
    """Writes the report; says so where it is not one to keep."""
    refused = moved(probe) > QUIET and not (args.noisy or args.quick)
    folder = NOISY if refused else args.out
    ranks = f"{args.ranks} rank" + ("s" if args.ranks > 1 else "")
    allocator = "" if args.allocator == "default" else args.allocator
    name = "-".join(filter(None, [args.bench, str(args.ranks), allocator, args.tag]))
    print(write(folder, name, f"{BENCHES[args.bench].title}, {ranks}", args, result, probe))
    if refused:
        return (
            f"no report: a probe moved by {moved(probe):.0%} while the benchmark ran ({probe_text(probe)}), so the "
            f"machine was not quiet; run it again, or with --noisy. What was measured: {folder / name}.md"
        )
    write_index(folder)
    return ""


def arguments() -> argparse.ArgumentParser:
    what = {name: bench.title for name, bench in BENCHES.items()}
    what |= {
        ALL: "all of them, each as often as `make bench` does",
        INDEX: "the index of the reports; each renews it too",
    }
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n" + "\n".join(f"  {name:10} {title}" for name, title in what.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("bench", choices=[*BENCHES, ALL, INDEX])
    add("--ranks", type=int, default=1)
    add("--rounds", type=int, help="rounds that are counted, at least 7 without --quick")
    add("--peers", nargs="+", help="trainers, e.g. autograd bare ddp tessera:1 tessera:3+10 fsdp2:3 deepspeed:2")
    add("--parameters", type=int, default=10_000_000, help="of step, tensors, layers and nvme")
    add("--counts", type=int, nargs="+", help="numbers of tensors, of tensors and layers")
    add("--sizes", nargs="+", choices=GPT_SIZES, help="of gpt, accumulate, overhead and memory")
    add("--elements", type=int, nargs="+", help="of kernels")
    add("--micro-steps", type=int, nargs="+", help="of accumulate; default: 1 4 16")
    add(
        "--precisions",
        nargs="+",
        choices=["fp32", "bf16"],
        help="of gpt, accumulate, memory and parallel; default of gpt and memory: both, for 30M and in quick mode bf16 "
        "only; of parallel fp32",
    )
    add("--rows", type=int, help="sequences a rank and step, of gpt, accumulate, overhead and tables")
    add(
        "--disk",
        dest="folder_of_checkpoints",
        help="of checkpoint, nvme and fits: a folder on the disk to measure; default: that of /tmp",
    )
    of_tables(parser.add_argument_group("of tables"))
    add("--allocator", choices=["default", "tuned"], default="default", help="tuned: freed memory is kept")
    add("--tag", help="ends the report's name, so that it does not replace that with the default options")
    add("--out", dest="folder", type=pathlib.Path, help="folder of the report")
    add("--quick", action="store_true", help="few rounds, small sizes; the report goes to build/bench-quick")
    add("--noisy", action="store_true", help="report although the machine is not quiet")
    return parser


def of_tables(group: Any) -> None:
    add = group.add_argument
    add(
        "--data",
        help="text of the pre-training and the start weights: a file, or a folder with train.txt and valid.txt",
    )
    add("--tune-data", help="text of the fine-tuning")
    add("--steps", type=int, nargs=3, metavar=("PRE", "TUNE", "START"), help="of both trainings and the start weights")
    add("--seeds", type=int, help="number of them, default 3")
    add("--state-sizes", nargs="+", choices=GPT_SIZES, help="of the GPTs whose memory and times are measured")
    add("--device", help="where the models are: cpu, or an accelerator of torch; default: that, if there is one")
    add("--jobs", type=int, help="trainings at a time; default: as many as the cores can take")


def complete(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Defaults that depend on the benchmark."""
    bench = BENCHES[args.bench]
    args.sizes = args.sizes or bench.sizes[1 if args.quick else 0]
    args.micro_steps = args.micro_steps or ([1, 4] if args.quick else [1, 4, 16])
    default = [p for p in bench.peers if p not in (bench.not_quick if args.quick else [])]
    args.peers = [p for p in args.peers or default if ("+gloo" not in p if args.ranks == 1 else p != "bare")]
    args.rows = args.rows or bench.rows
    if args.device not in (None, device.CPU, device.default()):
        parser.error(f"--device {args.device}: this torch finds no such accelerator here")
    if args.bench == "tables" and (args.device or device.default()) != device.CPU:
        args.tag = "-".join(filter(None, [args.device or device.default(), args.tag]))
        if args.ranks > 1:
            parser.error("--device: several ranks are for the CPU; on an accelerator there is one")
    args.rounds = args.rounds or (3 if args.quick else bench.rounds)
    if args.rounds < 7 and not args.quick:
        parser.error("a report needs at least 7 rounds; fewer with --quick")


def options() -> argparse.Namespace:
    parser = arguments()
    args = parser.parse_args()
    args.started = time.time()
    words = zip(["", *sys.argv[1:]], sys.argv[1:], strict=False)
    args.command = " ".join(["python bench/run.py", *("FOLDER" if last in OF_MACHINES else w for last, w in words)])
    args.out = args.folder or (ROOT / "build" / "bench-quick" if args.quick else HERE / "reports")
    if args.bench in BENCHES:
        complete(args, parser)
    return args


def main() -> None:
    args = options()
    if args.bench == INDEX:
        print(write_index(args.out))
        return
    if args.bench == ALL:
        sys.exit(run_all(args))
    if args.allocator == "tuned":  # read by glibc when the ranks start
        os.environ.update(MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_=str(1 << 40), MALLOC_TOP_PAD_=str(64 << 20))
    # Ranks are forked from a process that has only imported, which takes longer than a short run.
    mp.get_context("forkserver").set_forkserver_preload(["__main__", "tessera", "torch._dynamo"])
    if BENCHES[args.bench].alone:
        torch.set_num_threads(1)
        before = probe_machine()
        result = BENCHES[args.bench].run(args, setup, free_port)
        refused = report(args, result, result.probe or [[before, probe_machine()]])
    else:
        queue = mp.get_context("spawn").SimpleQueue()
        mp.start_processes(worker, (args, free_port(), queue), nprocs=args.ranks, start_method="forkserver")
        refused = queue.get()
    if refused:
        sys.exit(refused)


if __name__ == "__main__":
    main()
