"""Genuine DeepSpeed as one rank of a job, run by the tests as a program of its own.

usage: deepspeed_program.py JOBS      a JSON list of jobs, each {"do": ..., ...}; results are files

    train    {"stage", "precision", "out", "more"}: trains, saves into out/, goes on; out/state-RANK.pt has it all
    load     {"stage", "precision", "from", "out", "more"}: loads from/, writes what it then has, goes on
    fp32     {"from", "out"}: DeepSpeed's zero_to_fp32 over from/, rank 0
    convert  {"from", "tag", "to"}: DeepSpeed's ds_to_universal, rank 0
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import model as m
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator


def build(job: dict[str, Any]) -> Any:
    net = m.make()
    net.turned.data = net.turned.data.contiguous()  # DeepSpeed 0.19.8 sends first values as bytes, which need it
    config = m.config(job["stage"], job["precision"], **job.get("more", {}))
    return deepspeed.initialize(model=net, model_parameters=m.groups(net), config=config)[0]


def steps(engine: Any, first: int) -> list[float]:
    losses = []
    for step in range(first, first + m.STEPS):
        loss = engine(*m.batch(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def gathered(flat: torch.Tensor) -> list[torch.Tensor]:
    parts: list[Any] = [None] * dist.get_world_size()
    torch.distributed.all_gather_object(parts, flat.detach().clone())
    return parts


def values(engine: Any, stage: int) -> dict[str, dict[str, torch.Tensor]]:
    """Master and moments of every trained parameter, out of what DeepSpeed holds."""
    names = engine.param_names
    opt = engine.optimizer
    found: dict[str, dict[str, torch.Tensor]] = {}
    if stage == 0:
        inner = getattr(opt, "optimizer", opt)
        pairs = [(p, p) for group in inner.param_groups for p in group["params"]]
        if hasattr(opt, "fp32_groups"):
            pairs = [
                pair
                for low, high in zip(opt.fp16_groups, opt.fp32_groups, strict=True)
                for pair in zip(low, high, strict=True)
            ]
        for low, high in pairs:
            state = inner.state[high]
            found[names[low]] = {"master": high.detach().clone(), **{k: v.clone() for k, v in state.items()}}
        return found
    groups = opt.fp16_groups if stage == 3 else getattr(opt, "round_robin_bit16_groups", None) or opt.bf16_groups
    flats = next(
        getattr(opt, name)
        for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        if hasattr(opt, name)
    )
    for params, flat in zip(groups, flats, strict=True):
        state = opt.optimizer.state[flat]
        if not state:
            continue  # no update yet
        step = state["step"]
        for kind, part in {"master": flat, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}.items():
            parts = gathered(part)
            at = 0
            for param in params:
                shape = param.ds_shape if stage == 3 else param.shape
                numel = shape.numel()
                size = -(-numel // len(parts)) if stage == 3 else numel
                if stage == 3:
                    value = torch.cat([one[at : at + size] for one in parts])[:numel]
                else:
                    value = torch.cat(parts)[at : at + size]
                found.setdefault(names[param], {"step": torch.as_tensor(step).clone()})[kind] = value.view(
                    shape
                ).clone()
                at += size
    return found


def facts(engine: Any, stage: int) -> dict[str, Any]:
    opt = engine.optimizer
    scaler = {}
    if hasattr(opt, "loss_scaler"):
        scaler = {k: v for k, v in vars(opt.loss_scaler).items() if isinstance(v, (int, float))}
    if hasattr(opt, "loss_scale_config"):
        scaler = {k: v for k, v in vars(opt.loss_scale_config).items() if isinstance(v, (int, float))}
    return {
        "values": values(engine, stage),
        "buffers": {name: buffer.clone() for name, buffer in engine.module.named_buffers()},
        "counters": [engine.global_steps, engine.skipped_steps, engine.global_samples],
        "scaler": scaler,
        "schedule": engine.lr_scheduler.state_dict(),
        "lr": engine.get_lr(),
    }


def frozen(engine: Any) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters() if not p.requires_grad}


def train(job: dict[str, Any]) -> None:
    engine = build(job)
    before = steps(engine, 0)
    engine.save_checkpoint(
        job["out"], client_state={"epoch": 4, "scores": [1.5, torch.arange(3)]}, **job.get("save", {})
    )
    state = facts(engine, job["stage"])
    report(job, {**state, "before": before, "frozen": frozen(engine), "after": steps(engine, m.STEPS)})
    engine.destroy()


def load(job: dict[str, Any]) -> None:
    engine = build(job)
    path, client = engine.load_checkpoint(job["from"], **job.get("load", {}))
    assert path is not None
    state = facts(engine, job["stage"])
    client = {key: client.get(key) for key in ("epoch", "scores")}
    report(job, {**state, "client": client, "frozen": frozen(engine), "after": steps(engine, m.STEPS)})
    engine.destroy()


def report(job: dict[str, Any], state: dict[str, Any]) -> None:
    Path(job["out"]).mkdir(parents=True, exist_ok=True)
    torch.save(state, Path(job["out"]) / f"state-{dist.get_rank()}.pt")


def fp32(job: dict[str, Any]) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    if dist.get_rank() == 0:
        Path(job["out"]).mkdir(parents=True, exist_ok=True)
        torch.save(get_fp32_state_dict_from_zero_checkpoint(job["from"]), Path(job["out"]) / "fp32.pt")


def convert(job: dict[str, Any]) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    if dist.get_rank() == 0:
        main(
            argparse.Namespace(
                input_folder=f"{job['from']}/{job['tag']}", output_folder=f"{job['from']}/{job['to']}",
                num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
                inject_missing_state=job.get("inject", False),
            )
        )  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    get_accelerator().is_fp16_supported = lambda: True  # it asks for fast instructions, the tests do not
    deepspeed.init_distributed("gloo")
    failed = 0
    for job in json.loads(Path(sys.argv[1]).read_text()):
        try:
            {"train": train, "load": load, "fp32": fp32, "convert": convert}[job["do"]](job)
        except Exception as error:
            if not job.get("may_fail"):
                traceback.print_exc()
                print("job:", job, file=sys.stderr)
                failed += 1
            else:
                Path(job["out"]).mkdir(parents=True, exist_ok=True)
                (Path(job["out"]) / "error.txt").write_text(f"{type(error).__name__}: {error}")
        dist.barrier()
    sys.stdout.flush()
    os._exit(1 if failed else 0)  # not through the ends of threads and groups


if __name__ == "__main__":
    main()
