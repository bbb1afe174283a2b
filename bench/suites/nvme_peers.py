"""DeepSpeed's offload of optimizer states beside ours, in rounds in which every engine makes a step."""

from __future__ import annotations

import argparse
import pathlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from measure import ratio, summary
from report import cell, table
from torch import nn
from trainers import available

Seconds = dict[str, dict[str, list[float]]]  # by mode and engine
PEERS = {"deepspeed:3": ("DeepSpeed 3, nvme", "nvme"), "deepspeed:1": ("DeepSpeed 1, cpu", "cpu")}
MODES = {"fp32": 16, "bf16, exact": 14}
OWN = "Tessera 1, nvme"
HEADER = ["states", "engine", "step", "x our step on the disk"]


def deepspeed_of(peer: str, model: nn.Module, bf16: bool, folder: str, tile: int) -> Any:
    """Its pipeline is asked for, which needs buffers for three groups of four tensors; blocks are as large as ours."""
    import deepspeed

    device = PEERS[peer][1]
    offload: dict[str, Any] = {"device": device}
    if device == "nvme":
        offload |= {"nvme_path": folder, "pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": bf16, "check_grad_overflow": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": int(peer[-1]), "offload_optimizer": offload, "sub_group_size": tile},
        "aio": {"block_size": 4 << 20, "queue_depth": 16, "single_submit": False, "overlap_events": True},
    }
    return deepspeed.initialize(model=model, config=config)[0]


def measure_peers(
    args: argparse.Namespace,
    folder: pathlib.Path,
    own: Callable[[int, str | None], Any],
    model: Callable[[], nn.Module],
    step_seconds: Callable[[Any], float],
    tile: int,
) -> tuple[Seconds, list[str]]:
    """Seconds, and which peers could not be built and why."""
    seconds: Seconds = defaultdict(lambda: defaultdict(list))
    missing: list[str] = []
    wanted = [peer for peer in args.peers if peer in PEERS and available(peer)]
    for mode, state_bytes in MODES.items() if wanted else ():
        engines = {OWN: own(state_bytes, str(folder)), "Tessera 1, in memory": own(state_bytes, None)}
        for peer in wanted:
            try:
                engines[PEERS[peer][0]] = deepspeed_of(peer, model(), state_bytes < 16, str(folder / peer), tile)
                step_seconds(engines[PEERS[peer][0]])
            except Exception as error:  # its operators are compiled when they are first used
                engines.pop(PEERS[peer][0], None)
                missing.append(f"{PEERS[peer][0]} ({mode}): {(str(error).splitlines() or [repr(error)])[0]}")
        for _ in range(args.rounds):
            for name, engine in engines.items():
                seconds[mode][name].append(step_seconds(engine))
        for engine in engines.values():
            engine.destroy()
    return seconds, missing


def text_of(seconds: Seconds, missing: list[str]) -> list[str]:
    if not seconds:
        return []
    rows = [
        [mode, name, f"{cell(summary(values), 0)} ms", cell(ratio(values, engines[OWN]), 2)]
        for mode, engines in seconds.items()
        for name, values in engines.items()
    ]
    text = [
        "Beside DeepSpeed's offload, with its pipeline of reads and writes and blocks of 4 MiB, 16 on their way. Of a "
        "model on the CPU `cpu` changes nothing for Tessera; DeepSpeed keeps copies of gradients and weights.",
        table(HEADER, rows),
    ]
    return text + ([f"Could not be built here: {'; '.join(missing)}."] if missing else [])
