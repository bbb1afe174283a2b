"""Trains a GPT for two steps and prints the loss and the peak of this process's resident memory; for the suite fits:

fits_trial.py ENGINE LAYERS WIDTH FOLDER
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples" / "python")]

import memory  # noqa: E402
from gpt import Gpt, GptOptions  # noqa: E402

CONTEXT, STEPS = 128, 2
Train = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def options_of(layers: int, width: int) -> GptOptions:
    return GptOptions(layers, width, width // 64, CONTEXT)


def _section(stage: int, states: str, params: str, folder: str) -> dict[str, Any]:
    section: dict[str, Any] = {"stage": stage}
    if states != "none":
        section["offload_optimizer"] = {"device": states, "nvme_path": folder}
    if params != "none":
        section["offload_param"] = {"device": params, "nvme_path": folder, "max_in_cpu": 0, "buffer_count": 2}
    return section


def _config(zero: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
    }


def tessera(options: GptOptions, zero: dict[str, Any]) -> Train:
    import tessera

    config = _config(zero) | {"tessera": {"update_in_backward": True}}
    with tessera.zero.Init(config=config, enabled=zero["stage"] == 3):
        model = Gpt(options)
    return _engine(tessera.initialize(model=model, config=config)[0])


# Elements. Its defaults are for larger machines: groups of 1e9, buckets of 5e8.
DEEPSPEED_BUFFERS = {"offload_optimizer": {"buffer_count": 5}, "offload_param": {"buffer_size": 5e6}}
DEEPSPEED_SIZES = {
    "sub_group_size": 1e7,
    "reduce_bucket_size": 5e6,
    "stage3_prefetch_bucket_size": 5e6,
    "stage3_max_live_parameters": 2e7,
}


def deepspeed(options: GptOptions, zero: dict[str, Any]) -> Train:
    import deepspeed

    # Fewer than its partitioned parameters end it with "Not enough buffers".
    own = {"offload_param": {"buffer_count": 4 * options.layers + 4}}
    for section, buffers in DEEPSPEED_BUFFERS.items():
        if zero.get(section, {}).get("device") == "nvme":
            zero[section] |= buffers | own.get(section, {})
    config = _config(zero | DEEPSPEED_SIZES)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=zero["stage"] == 3):
        model = Gpt(options)
    return _engine(deepspeed.initialize(model=model, config=config)[0])


def _engine(engine: Any) -> Train:
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        return loss

    return train


def fsdp2(options: GptOptions, zero: dict[str, Any]) -> Train:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    shard: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    model: nn.Module = Gpt(options)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **shard)
    fully_shard(model, **shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train


# Name in the table, how it is built, stage, where states and parameters live.
ENGINES: dict[str, tuple[str, Callable[..., Train], int, str, str]] = {
    "tessera:nvme": ("Tessera 3, states and parameters nvme", tessera, 3, "nvme", "nvme"),
    "tessera:states": ("Tessera 1, states nvme", tessera, 1, "nvme", "none"),
    "tessera:memory": ("Tessera 1, all in memory (as cpu)", tessera, 1, "none", "none"),
    "deepspeed:nvme": ("DeepSpeed 3, states and parameters nvme", deepspeed, 3, "nvme", "nvme"),
    "deepspeed:cpu": ("DeepSpeed 3, states and parameters cpu", deepspeed, 3, "cpu", "cpu"),
    "deepspeed:states": ("DeepSpeed 2, states cpu", deepspeed, 2, "cpu", "none"),
    "fsdp2:cpu": ("FSDP2, CPUOffloadPolicy", fsdp2, 3, "cpu", "cpu"),
}


def main() -> None:
    name, layers, width, folder = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo")
    _, build, stage, states, params = ENGINES[name]
    train = build(options_of(int(layers), int(width)), _section(stage, states, params, folder))
    text = torch.randint(0, 256, (1, CONTEXT + 1))
    for _ in range(STEPS):
        loss = train(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    print("fits_trial", loss.item(), memory.peak(), flush=True)
    os._exit(0)  # peers leave threads behind


if __name__ == "__main__":
    main()
