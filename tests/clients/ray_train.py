"""Ray Train's DeepSpeed example: TorchTrainer starts the workers, the loop drives the engine's parts by hand. Beside
plain PyTorch with all workers' data. usage: ray_train.py WORKERS"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import ray
import ray.train
import torch
from accelerate_loop import batches, model
from common import assert_equal, assert_losses, rank, whole, world
from ray.train.torch import TorchConfig, TorchTrainer

STEPS = 4
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": True,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.01}},
}


def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01)
    data, losses = batches(), []
    for number in range(STEPS):
        for other in range(world()):
            x, y = data[number * world() + other]
            loss = (net(x) - y).square().mean()
            (loss / world()).backward()
            if other == rank():
                losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach().clone() for name, p in net.named_parameters()}


def train_function(given: dict[str, str]) -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    net = model()
    engine, optimizer, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)
    device = get_accelerator().device_name(engine.local_rank)
    assert device == "cpu" and engine.global_rank == rank() == ray.train.get_context().get_world_rank()
    losses, data = [], batches()
    for number in range(STEPS):
        x, y = data[number * world() + rank()]
        loss = (engine(x.to(device)) - y.to(device)).square().mean()
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    expected, weights = plain()
    assert_losses(losses, expected)
    assert_equal(whole(engine.module), weights)
    engine.save_checkpoint(given["folder"])
    ray.train.report({"loss": losses[-1]})
    engine.destroy()


def main() -> None:
    workers = int(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="tessera-ray-") as folder:
        ray.init(num_cpus=workers + 1, include_dashboard=False, logging_level="warning", object_store_memory=80 * 2**20)
        trainer = TorchTrainer(
            train_function,
            train_loop_config={"folder": os.path.join(folder, "checkpoint")},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=False),
            run_config=ray.train.RunConfig(storage_path=folder),
        )
        assert trainer.fit().error is None and os.path.exists(os.path.join(folder, "checkpoint", "latest"))
        ray.shutdown()
    print(f"[0] Ray Train, {workers} workers: passed", flush=True)


if __name__ == "__main__":
    main()
