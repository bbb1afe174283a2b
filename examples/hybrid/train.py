"""Trains a small Qwen2.5-VL in two groups of Ray actors: the vision tower with Ulysses, ZeRO-1 and low-precision
states, the language model with AutoTP. The same training in one process runs beside it.

    python examples/hybrid/train.py --steps 10
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import ray
from ranks import Job, TextRank, VisionRank, losses_of_one_process
from tessera.hybrid import ActorError, ActorGroup, Program


def program_of(job: Job, folder: str, gpus: float = 0) -> Program:
    """`gpus` of a rank: half a one each where the two groups share them."""
    groups = [
        ActorGroup("vision", VisionRank, job.vision_ranks, (job,), gpus=gpus, timeout=job.timeout),
        ActorGroup("text", TextRank, job.text_ranks, (job,), gpus=gpus, timeout=job.timeout),
    ]
    return Program(groups, folder)


def train(program: Program, steps: int, save_every: int) -> list[float]:
    """The losses. When ranks die, it goes on from the last checkpoint."""
    losses: list[float] = []
    program.save("start", {"step": 0})
    while len(losses) < steps:
        try:
            losses.append(program.step("train", len(losses))["text"][0]["loss"])
            print(f"step {len(losses)} loss {losses[-1]:.4f}", flush=True)
            if len(losses) % save_every == 0:
                program.save(f"step{len(losses)}", {"step": len(losses)})
        except ActorError as error:
            print(f"{error}\nGoing on from the last checkpoint.", flush=True)
            del losses[program.restore()["step"] :]
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--folder", help="of checkpoints; default: one that is gone at the end")
    parser.add_argument("--precision", choices=["low", "fp32"], default="low")
    parser.add_argument("--vision-ranks", type=int, default=2)
    parser.add_argument("--text-ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--size", type=int, default=112, help="pixels of a picture's side")
    parser.add_argument("--gpus", type=float, default=0, help="of a rank")
    args = parser.parse_args()
    job = Job(args.vision_ranks, args.text_ranks, args.micro_batches, size=args.size, precision=args.precision)
    # The actors import this folder's modules.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *(os.path.abspath(p) for p in sys.path)])
    ray.init(
        num_cpus=max(os.cpu_count() or 1, args.vision_ranks + args.text_ranks),
        include_dashboard=False,
        logging_level="ERROR",
    )
    with tempfile.TemporaryDirectory() as scratch, program_of(job, args.folder or scratch, args.gpus) as program:
        losses = train(program, args.steps, args.save_every)
    ray.shutdown()
    for step, (hybrid, one) in enumerate(zip(losses, losses_of_one_process(job, args.steps), strict=True)):
        print(f"step {step + 1} loss {hybrid:.4f}, of one process in fp32 {one:.4f}")


if __name__ == "__main__":
    main()
