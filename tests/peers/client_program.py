"""Transformers' Trainer and Accelerate over whatever `deepspeed` is, as one rank of a job.

usage: client_program.py OUT      writes the losses of every run to OUT/losses-RANK.json

The programs are those of tests/clients, which is on the path; what else is there says which DeepSpeed it is."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import accelerate_loop
import deepspeed
import torch
import trainer

STAGES = (0, 1, 2, 3)


def of_trainer(stage: int, bf16: bool) -> list[float]:
    chosen = trainer.without(trainer.config(stage, bf16={"enabled": bf16}), "optimizer", "scheduler")
    made = trainer.trainer(trainer.arguments(f"stage{stage}-{bf16}", chosen, bf16=bf16, use_cpu=True))
    made.train()
    assert type(made.deepspeed).__name__ == "DeepSpeedEngine"
    return trainer.losses(made)


def of_accelerate(stage: int) -> list[float]:
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # of a Trainer before
    accelerator = accelerate_loop.accelerator(stage)
    return accelerate_loop.train(accelerator, accelerate_loop.prepared(accelerator))


def main() -> None:
    found: dict[str, list[float]] = {}
    for stage in STAGES:
        found[f"trainer, stage {stage}, fp32"] = of_trainer(stage, False)
        found[f"trainer, stage {stage}, bf16"] = of_trainer(stage, True)
        if stage > 0:  # DeepSpeed has no gradient norm at stage 0 in fp32, and the loop asks for it
            found[f"accelerate, stage {stage}, fp32"] = of_accelerate(stage)
    about = {"version": deepspeed.__version__, "losses": found}
    (Path(sys.argv[1]) / f"losses-{os.environ['RANK']}.json").write_text(json.dumps(about))


if __name__ == "__main__":
    try:
        torch.set_num_threads(1)
        main()
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # not through the ends of threads and groups
