"""Lightning's and Fabric's DeepSpeed strategies. They refuse other accelerators than CUDA's; here it is one with
devices of the CPU, without their check of which GPUs were chosen. Everything else is theirs."""

from __future__ import annotations

import functools
import os
from typing import Any

import lightning
import lightning.fabric.strategies.deepspeed
import lightning.pytorch.strategies.deepspeed
import torch
from common import assert_equal, assert_losses, rank, run, shared_folder, whole, world
from lightning.fabric.accelerators import CUDAAccelerator as FabricCuda
from lightning.fabric.strategies import DeepSpeedStrategy as FabricStrategy
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

BATCHES = 6

lightning.fabric.strategies.deepspeed._validate_device_index_selection = lambda parallel_devices: None
lightning.pytorch.strategies.deepspeed._validate_device_index_selection = lambda parallel_devices: None


class _Host:
    def setup_device(self, device: torch.device) -> None: ...
    def setup(self, trainer: Any) -> None: ...
    def teardown(self) -> None: ...

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return list(range(world()))

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cpu")] * world()

    @staticmethod
    def auto_device_count() -> int:
        return world()

    @staticmethod
    def is_available() -> bool:
        return True


class HostForFabric(_Host, FabricCuda): ...


class Host(_Host, CUDAAccelerator): ...


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 1))


def batch(number: int, of: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * number + of)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 1, generator=generator)


@functools.cache
def plain(clip: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for number in range(BATCHES):
        for of in range(world()):
            x, y = batch(number, of)
            loss = (net(x) - y).square().mean()
            (loss / world()).backward()
            if of == rank():
                losses.append(loss.item())
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach().clone() for name, p in net.named_parameters()}


def options(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "config": {
            **more,
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
        "process_group_backend": "gloo",
    }


def fabric(stage: int) -> None:
    expected, weights = plain(False)
    made = lightning.Fabric(
        accelerator=HostForFabric(),
        strategy=FabricStrategy(**options(stage, gradient_clipping=0.0)),
        devices=world(),
        precision="32-true",
    )
    made.launch()
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer = made.setup(net, optimizer)
    losses = []
    for number in range(BATCHES):
        x, y = batch(number, rank())
        loss = (net(x) - y).square().mean()
        made.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_losses(losses, expected)
    trained = whole(net._forward_module.module)
    assert_equal(trained, weights)
    place = os.path.join(shared_folder(), f"fabric{stage}")
    state = {"model": net, "optimizer": optimizer, "note": 7}
    made.save(place, state)
    found = set(os.listdir(place))
    assert found == {"checkpoint", "latest", "zero_to_fp32.py"}, found
    with torch.no_grad():
        x, y = batch(99, rank())
    loss = (net(x) - y).square().mean()
    made.backward(loss)
    optimizer.step()
    state["note"] = 0
    made.load(place, state)
    assert state["note"] == 7
    assert_equal(whole(net._forward_module.module), trained, 0)
    net._forward_module.destroy()


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            self.net = model()

    def training_step(self, data: Any, index: int) -> torch.Tensor:
        x, y = batch(index, rank())
        loss = (self.net(x) - y).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.arange(BATCHES * world()), batch_size=1)


def lightning_trainer(stage: int) -> None:
    expected, weights = plain(True)
    place = os.path.join(shared_folder(), f"lightning{stage}")
    module = Module()
    trainer = lightning.Trainer(
        accelerator=Host(),
        strategy=DeepSpeedStrategy(**options(stage)),
        devices=world(),
        precision="32-true",
        max_epochs=1,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
        default_root_dir=place,
    )
    trainer.fit(module)
    assert_losses(module.losses, expected)
    trained = whole(trainer.strategy.deepspeed_engine.module)
    assert_equal({name.rpartition("net.")[2]: value for name, value in trained.items()}, weights)
    trainer.save_checkpoint(os.path.join(place, "last.ckpt"))
    assert os.path.isdir(os.path.join(place, "last.ckpt", "checkpoint"))


def main() -> None:
    torch.distributed.init_process_group("gloo")
    shared_folder()
    paths: dict[str, Any] = {}
    for stage in (1, 2, 3):
        paths[f"Fabric, stage {stage}"] = functools.partial(fabric, stage)
        paths[f"Lightning, stage {stage}"] = functools.partial(lightning_trainer, stage)
    run(paths)


if __name__ == "__main__":
    main()
