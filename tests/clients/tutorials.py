"""What DeepSpeed's tutorials call (getting started, ZeRO, leaf modules, autocast, checkpoints, universal checkpoints),
in programs of our own beside plain PyTorch."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import deepspeed
import torch
from common import assert_equal, assert_losses, rank, run, shared_folder, whole, world
from torch import nn

STEPS = 4
ROWS = 4
SIZES = {"zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": ROWS, "gradient_clipping": 0.0}


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, width), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def net(kind: Any = Net) -> Any:
    torch.manual_seed(0)
    return kind()


def data() -> torch.utils.data.Dataset[Any]:
    generator = torch.Generator().manual_seed(1)
    count = STEPS * ROWS * world()
    return torch.utils.data.TensorDataset(
        torch.randn(count, 6, generator=generator), torch.randn(count, 1, generator=generator)
    )


def config(stage: int = 0, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    adam = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}
    return {**SIZES, "optimizer": adam, "zero_optimization": zero, **more}


def batch(step: int, of: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + of)
    return torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 1, generator=generator)


def plain(model: Any, steps: int = STEPS) -> list[float]:
    """The losses of this rank; the model is trained on all ranks' data."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(steps):
        for of in range(world()):
            x, y = batch(step, of)
            loss = nn.functional.mse_loss(model(x), y)
            (loss / world()).backward()
            if of == rank():
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train(engine: Any, begin: int = 0, end: int = STEPS) -> list[float]:
    losses = []
    for step in range(begin, end):
        x, y = batch(step, rank())
        loss = nn.functional.mse_loss(engine(x).float(), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def getting_started() -> None:
    """Arguments of the command line, a loader of the engine's, a checkpoint with values of the program's own."""
    file = os.path.join(shared_folder(), "config.json")
    if rank() == 0:
        with open(file, "w") as out:
            json.dump(config(1), out)
    deepspeed.comm.barrier()
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", file, "--local_rank", os.environ["LOCAL_RANK"]])
    model = net()
    engine, optimizer, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=data()
    )
    assert len(loader) == STEPS and optimizer is engine.optimizer
    device = deepspeed.get_accelerator().device_name(engine.local_rank)
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(engine(x.to(device)), y.to(device))
        engine.backward(loss)
        engine.step()
        if step == 1:
            engine.save_checkpoint(os.path.join(shared_folder(), "started"), "second", client_state={"step": step})
    weights = whole(engine.module)
    path, state = engine.load_checkpoint(os.path.join(shared_folder(), "started"), "second")
    assert path is not None and state["step"] == 1 and engine.global_steps == 2
    assert any(not torch.equal(value, weights[name]) for name, value in whole(engine.module).items())
    engine.destroy()


def zero() -> None:
    """A model built partitioned, edited inside a region, trained, and its fp32 weights of the checkpoint."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    chosen = config(3)
    with deepspeed.zero.Init(config_dict_or_path=chosen):
        model = net()
    with deepspeed.zero.GatheredParameters(model.second.weight, modifier_rank=0):
        if rank() == 0:
            nn.init.constant_(model.second.weight, 0.5)
    reference = net()
    nn.init.constant_(reference.second.weight, 0.5)
    engine = deepspeed.initialize(model=model, config=chosen)[0]
    assert_losses(train(engine), plain(reference))
    assert_equal(whole(engine.module), parameters_of(reference))
    place = os.path.join(shared_folder(), "zero")
    engine.save_checkpoint(place)
    deepspeed.comm.barrier()
    assert_equal(dict(get_fp32_state_dict_from_zero_checkpoint(place)), parameters_of(reference))
    engine.destroy()


class Experts(nn.Module):
    """Which expert runs differs by rank and row."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choice = (x.sum(1) > 0).long()
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = choice == number
            if rows.any():
                out[rows] = expert(x[rows])
        return out


class Mixture(Net):
    def __init__(self) -> None:
        super().__init__()
        self.moe = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.moe(torch.tanh(self.first(x))))


def leaf_modules() -> None:
    for by in ("class", "configuration"):
        model, reference, chosen = net(Mixture), net(Mixture), config(3)
        if by == "class":
            assert deepspeed.utils.set_z3_leaf_modules(model, [Experts]) == [model.moe]
            assert deepspeed.utils.z3_leaf_module(model.moe) and not deepspeed.utils.z3_leaf_module(model)
        else:
            chosen["zero_optimization"]["leaf_module"] = {"classes": ["Experts"]}
        engine = deepspeed.initialize(model=model, config=chosen)[0]
        expected = plain(reference)
        assert_losses(train(engine), expected)
        assert_equal(whole(engine.module), parameters_of(reference))
        engine.destroy()


def autocast() -> None:
    from deepspeed.runtime.torch_autocast import has_autocast_dtype

    section = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]}
    engine = deepspeed.initialize(model=net(), config=config(2, torch_autocast=section))[0]
    assert engine.torch_autocast_enabled() and engine.torch_autocast_dtype() is torch.bfloat16
    assert has_autocast_dtype(engine.module.first.weight) and engine.module.first.weight.dtype is torch.float32
    reference = net()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.0)
    expected = []
    for step in range(STEPS):
        for of in range(world()):
            x, y = batch(step, of)
            with torch.autocast("cpu", torch.bfloat16):
                out = reference(x)
            loss = nn.functional.mse_loss(out.float(), y)
            (loss / world()).backward()
            if of == rank():
                expected.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert_losses(train(engine), expected, 2e-2)  # gradients travel in bf16
    engine.destroy()


def checkpoints() -> None:
    """Resumed, bit for bit; activation checkpoints with the process-wide functions."""
    place = os.path.join(shared_folder(), "checkpoints")
    engine = deepspeed.initialize(model=net(), config=config(2))[0]
    train(engine, 0, 2)
    engine.save_checkpoint(place)
    expected, weights = train(engine, 2), whole(engine.module)
    engine.destroy()
    engine = deepspeed.initialize(model=net(), config=config(2))[0]
    path, _ = engine.load_checkpoint(place)
    assert path is not None and train(engine, 2) == expected
    for name, value in whole(engine.module).items():
        assert torch.equal(value, weights[name]), name
    engine.destroy()

    deepspeed.checkpointing.configure(None, checkpoint_in_cpu=True)
    model, reference = net(), net()
    forward = model.forward
    model.forward = lambda x: deepspeed.checkpointing.checkpoint(forward, x)
    engine = deepspeed.initialize(model=model, config=config(1))[0]
    assert_losses(train(engine), plain(reference))
    engine.destroy()


def universal() -> None:
    """Saved at stage 2, made universal by the command, loaded at stage 3."""
    place = os.path.join(shared_folder(), "universal")
    engine = deepspeed.initialize(model=net(), config=config(2, checkpoint={"format": "deepspeed"}))[0]
    train(engine, 0, 2)
    engine.save_checkpoint(place, "here")
    expected, weights = train(engine, 2), whole(engine.module)
    engine.destroy()
    deepspeed.comm.barrier()
    if rank() == 0:
        folders = ["--input_folder", f"{place}/here", "--output_folder", f"{place}/there"]
        program = "from deepspeed.checkpoint.ds_to_universal import main; main()"
        done = subprocess.run([sys.executable, "-c", program, *folders], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    deepspeed.comm.barrier()
    engine = deepspeed.initialize(model=net(), config=config(3, checkpoint={"load_universal": True}))[0]
    path, _ = engine.load_checkpoint(place, "there")
    assert path is not None and engine.global_steps == 2
    assert_losses(train(engine, 2), expected)
    assert_equal(whole(engine.module), weights)
    engine.destroy()


def main() -> None:
    deepspeed.init_distributed("gloo")
    shared_folder()
    paths: dict[str, Any] = {
        "getting started": getting_started,
        "ZeRO": zero,
        "leaf modules": leaf_modules,
        "autocast": autocast,
        "checkpoints": checkpoints,
        "universal checkpoints": universal,
    }
    run(paths)


if __name__ == "__main__":
    main()
