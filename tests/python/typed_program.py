"""A program of a user that names what it gets: test_package.py has mypy --strict read it, and runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from tessera.monitor import Event, JsonLines
from torch import nn
from torch.utils.data import Dataset

import tessera
from tessera import checkpoints
from tessera.pipeline import LayerSpec, PipelineEngine, PipelineModule

CONFIG: dict[str, object] = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
}


class Pairs(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((4,), float(index)), torch.zeros(4)


class Kept:
    """A writer of one's own."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, events: Iterable[Event]) -> None:
        self.events += events

    def close(self) -> None: ...


def shown(name: str, value: float, x: int) -> None:
    if name == "Train/Samples/lr":
        print(name, value, x)


def by_groups(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def train(folder: Path) -> None:
    with tessera.zero.Init(config=CONFIG):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = tessera.Config.from_dict(CONFIG)
    engine, optimizer, loader, schedule = tessera.initialize(model=model, config=config, training_data=Pairs())
    kept = Kept()
    engine.monitor.writers["mine"] = kept
    engine.monitor.writers["json"] = JsonLines(folder / "run.jsonl")
    engine.monitor.on_metric(shown)
    engine.expect(8, tokens_per_sample=4)
    for batch in loader:
        inputs: tuple[torch.Tensor, torch.Tensor] = (batch[0], batch[1])
        x, y = tessera.cast_inputs(engine, *inputs)
        loss: torch.Tensor = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        norm: float | None = engine.global_grad_norm()
        assert norm is None or norm >= 0
    rates: list[float] = engine.get_lr()
    assert schedule is not None and list(schedule.get_last_lr()) == rates
    seconds: dict[str, float] = engine.phase_seconds()
    steps: int = engine.global_steps + engine.skipped_steps
    held: int = engine.memory().params + engine.core.memory().states
    assert optimizer is not None and len(optimizer.param_groups) == 1 and schedule is not None
    print(rates[0], seconds["forward"], steps, held, len(kept.events), engine.memory())
    stage: int = engine.config.zero_optimization.stage
    assert stage == 3 and engine.config.optimizer.type == "AdamW"
    with tessera.zero.GatheredParameters(list(engine.module.parameters())):
        total = sum(param.float().sum().item() for param in engine.module.parameters())
    param = next(engine.module.parameters())
    master: torch.Tensor | None = tessera.state.get_full_fp32_param(engine, param)
    assert master is not None and master.numel() == 16 and total < 32

    saved: bool = engine.save_checkpoint(folder / "run", tag="a", client_state={"epoch": 1}, keep_last=2)
    path, client = engine.load_checkpoint(folder / "run")
    assert saved and path.endswith("a") and client["epoch"] == 1
    loaded: tuple[str, dict[str, object]] = engine.load_checkpoint(folder / "run", "a", missing_ok=False)
    none: tuple[str | None, dict[str, object] | None] = engine.load_checkpoint(folder / "none", missing_ok=True)
    assert none == (None, None) and loaded[1] == client
    whole: dict[str, torch.Tensor] = checkpoints.state_dict(folder / "run")
    assert len(whole) == 4
    engine.save_16bit_model(folder / "out", "model.safetensors", max_shard_size="5GB")
    engine.destroy()


def train_by_an_optimizer_of_ones_own() -> None:
    model = nn.Linear(4, 4)
    own: Callable[[list[dict[str, object]]], torch.optim.Optimizer] = by_groups
    first, *_ = tessera.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2}, optimizer=own)
    with first.no_sync():
        first.backward(first(torch.ones(2, 4)).sum())
    engines: list[tessera.Engine] = [first]
    for engine in engines:
        engine.step()
    first.destroy()


def layer(x: torch.Tensor) -> torch.Tensor:
    return x.tanh()


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield torch.ones(2, 4), torch.zeros(2, 4)


def train_a_pipeline() -> None:
    layers = PipelineModule(
        [LayerSpec(nn.Linear, 4, 4), layer, nn.Linear(4, 4)], num_stages=1, loss_fn=nn.functional.mse_loss
    )
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = tessera.initialize(model=layers, config=config, engine_type=PipelineEngine)[0]
    loss: torch.Tensor = engine.train_batch(batches())
    mean: torch.Tensor = engine.eval_batch(batches())
    assert mean.shape == loss.shape
    print(loss.item(), engine.stage_id, engine.num_stages)
    engine.destroy()


def main(folder: Path) -> None:
    try:
        tessera.initialize(model=nn.Linear(4, 4), config={"optimiser": {}})
    except tessera.ConfigError as error:
        print(error.origin, [problem.path for problem in error.problems])
    train(folder)
    train_by_an_optimizer_of_ones_own()
    train_a_pipeline()


if __name__ == "__main__":
    main(Path("typed"))
