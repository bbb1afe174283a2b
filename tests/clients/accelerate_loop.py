"""accelerate.Accelerator with a DeepSpeedPlugin: a loop with accumulation, clipping and a schedule, saved and loaded,
beside plain PyTorch. Also started by `accelerate launch` with its configuration file, and as the loop of Ray Train."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.state import AcceleratorState
from common import assert_equal, assert_losses, rank, run, shared_folder, whole, world
from torch import nn

ACCUMULATION = 2
BATCHES = 8
CLIP = 0.5


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 1))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of all ranks, one after the other."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 6, generator=generator), torch.randn(4, 1, generator=generator))
        for _ in range(BATCHES * world())
    ]


def optimizer_of(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def rate(step: int) -> float:
    return 1 / (1 + step)


@functools.cache
def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """This rank's losses and the weights, with all ranks' data here."""
    net = model()
    optimizer = optimizer_of(net.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses = []
    data = batches()
    for number in range(BATCHES):
        for other in range(world()):
            x, y = data[number * world() + other]
            loss = (net(x) - y).square().mean()
            (loss / world() / ACCUMULATION).backward()
            if other == rank():
                losses.append(loss.item())
        if (number + 1) % ACCUMULATION == 0:
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
            for _ in range(world()):  # accelerate's schedules count the batches of all ranks
                schedule.step()
            optimizer.zero_grad()
    return losses, {name: p.detach().clone() for name, p in net.named_parameters()}


class Pairs(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.items = [(x[i], y[i]) for x, y in batches() for i in range(len(x))]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.items[index]


def accelerator(stage: int | None, layout: str = "tessera") -> Accelerator:
    """`stage` None: as the environment of `accelerate launch` says. `layout`: of checkpoints."""
    AcceleratorState._reset_state(True)
    plugin = None
    if stage is not None:
        plugin = DeepSpeedPlugin(
            zero_stage=stage, gradient_accumulation_steps=ACCUMULATION, gradient_clipping=CLIP, zero3_init_flag=False
        )
        plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        plugin.deepspeed_config["checkpoint"] = {"format": layout}
    return Accelerator(
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=ACCUMULATION,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )


def prepared(accelerator: Accelerator) -> Any:
    net = model()
    optimizer = optimizer_of(net.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    loader = torch.utils.data.DataLoader(Pairs(), batch_size=4)
    return accelerator.prepare(net, optimizer, loader, schedule)


def train(accelerator: Accelerator, parts: Any, first: int = 0, last: int = BATCHES) -> list[float]:
    net, optimizer, loader, schedule = parts
    losses = []
    for number, (x, y) in enumerate(loader):
        if not first <= number < last:
            continue
        with accelerator.accumulate(net):
            loss = (net(x) - y).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                assert accelerator.clip_grad_norm_(net.parameters(), CLIP) > 0
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trains_as_plain(stage: int | None) -> None:
    expected, weights = plain()
    acc = accelerator(stage)
    parts = prepared(acc)
    assert_losses(train(acc, parts), expected)
    assert_equal(whole(acc.unwrap_model(parts[0])), weights)
    acc.free_memory()


def saves_and_loads(stage: int, layout: str = "tessera") -> None:
    """save_state in the middle, load_state into a new run: the same losses and weights, bit for bit."""
    acc = accelerator(stage, layout)
    place = os.path.join(shared_folder(), f"accelerate{stage}{layout}")
    parts = prepared(acc)
    train(acc, parts, 0, 4)
    acc.save_state(place)
    losses, weights = train(acc, parts, 4), whole(parts[0].module)
    acc.free_memory()
    acc = accelerator(stage)
    again = prepared(acc)
    acc.load_state(place)
    resumed = train(acc, again, 4)
    assert resumed == losses, (resumed, losses)
    for name, value in whole(again[0].module).items():
        assert torch.equal(value, weights[name]), name
    acc.free_memory()


def state_dict(stage: int) -> None:
    acc = accelerator(stage)
    if stage == 3:
        acc.state.deepspeed_plugin.deepspeed_config["zero_optimization"][
            "stage3_gather_16bit_weights_on_model_save"
        ] = True
    parts = prepared(acc)
    state = acc.get_state_dict(parts[0])
    if rank() == 0 or stage < 3:
        assert_equal(dict(state), {name: p.detach() for name, p in model().named_parameters()}, 0)
    acc.free_memory()


def ray_loop() -> None:
    """What Ray Train's example does on each worker: the engine's parts driven by hand."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": True,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    engine, optimizer, _, schedule = deepspeed.initialize(model=model(), model_parameters=None, config=config)
    device = get_accelerator().device_name(engine.local_rank)
    assert device == "cpu" and engine.global_rank == rank()
    before = whole(engine.module)
    for x, y in batches()[:3]:
        loss = (engine(x.to(device)) - y.to(device)).square().mean()
        engine.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert any(not torch.equal(value, before[name]) for name, value in whole(engine.module).items())
    engine.save_checkpoint(os.path.join(shared_folder(), "ray"))
    engine.destroy()


def main() -> None:
    if "TESSERA_CLIENTS_LAUNCHED" in os.environ:  # by `accelerate launch` with a configuration file
        run({"accelerate launch": functools.partial(trains_as_plain, None)})
    paths: dict[str, Any] = {}
    for stage in (0, 1, 2, 3):
        paths[f"trains as plain, stage {stage}"] = functools.partial(trains_as_plain, stage)
        paths[f"saves and loads, stage {stage}"] = functools.partial(saves_and_loads, stage)
        paths[f"saves and loads DeepSpeed's files, stage {stage}"] = functools.partial(
            saves_and_loads, stage, "deepspeed"
        )
        paths[f"state dict, stage {stage}"] = functools.partial(state_dict, stage)
    paths["Ray Train's loop"] = ray_loop
    run(paths)


if __name__ == "__main__":
    main()
