"""Models and processes of the pipeline's tests."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from support import Block, free_port, run_processes
from torch import nn
from torch.nn import functional as F

import tessera
from tessera.pipeline import LayerSpec, PipelineModule, TiedLayerSpec

VOCABULARY, WIDTH = 11, 6


def units_of_layers(model: nn.Module) -> dict[str, str]:
    """As a PipelineEngine has them, so that sums are those of the same units."""
    return {name: ".".join(name.split(".")[:2]) for name, _ in model.named_parameters(remove_duplicate=False)}


def scale(x: torch.Tensor) -> torch.Tensor:
    """A layer without parameters."""
    return x * 1.5


class Embedding(nn.Embedding):
    """With positions, which the head does not use."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + self.positions


def logits(module: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, module.weight)


def idle(module: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    """Uses nothing of it."""
    return x @ torch.linspace(-1, 1, WIDTH * VOCABULARY).view(WIDTH, VOCABULARY)


def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.float().flatten(0, 1), labels.flatten())


def layers(tied: bool | str = False, blocks: int = 6) -> list[Any]:
    middle = [LayerSpec(Block, WIDTH) for _ in range(blocks)]
    middle.insert(2, scale)
    if tied:
        head = TiedLayerSpec("embed", Embedding, forward_fn=idle if tied == "idle" else logits)
        return [TiedLayerSpec("embed", Embedding), *middle, head]
    return [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), *middle, LayerSpec(nn.Linear, WIDTH, VOCABULARY)]


def batch(seed: int, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def data(place: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless, of one data-parallel rank."""
    return (batch(1000 * place + number) for number in itertools.count())


def config(stage: int = 0, micro_batches: int = 4, dtype: str = "fp32", **more: Any) -> dict[str, Any]:
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    if dtype == "bf16":
        result["bf16"] = {"enabled": True}
    if dtype == "fp16":
        result["fp16"] = {"enabled": True, "initial_scale_power": 8}
    return result | more


def module(stages: int, tied: bool | str = False, **more: Any) -> PipelineModule:
    return PipelineModule(layers(tied), num_stages=stages, loss_fn=loss_fn, seed_layers=True, **more)


def pipeline(model: PipelineModule, cfg: dict[str, Any], **more: Any) -> tessera.pipeline.PipelineEngine:
    engine = tessera.initialize(model=model, config=cfg, **more)[0]
    assert isinstance(engine, tessera.pipeline.PipelineEngine)
    return engine


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


class Whole:
    """The same model on one engine over the ranks of one stage: what a pipeline must come to."""

    def __init__(self, cfg: dict[str, Any], group: Any, tied: bool = False) -> None:
        cfg = cfg | {"pipeline": {}}
        self.module = PipelineModule(layers(tied), num_stages=1, loss_fn=loss_fn, seed_layers=True)
        self.engine = tessera.Engine(self.module, cfg, group=group, unit_policy=units_of_layers)

    def train_batch(self, data_iter: Iterator[Any]) -> torch.Tensor:
        """The mean loss of this rank."""
        total = torch.zeros(())
        steps = self.engine.gradient_accumulation_steps()
        for _ in range(steps):
            inputs, labels = next(data_iter)
            loss = loss_fn(self.engine(inputs), labels)
            self.engine.backward(loss)
            self.engine.step()
            total = total + loss.detach().float()
        return total / steps


def start(rank: int, world: int, port: int, seconds: float = 60) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=seconds),
    )


def _body(rank: int, world: int, port: int, body: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    start(rank, world, port)
    try:
        body(rank, *args)
    finally:
        dist.destroy_process_group()


def in_processes(world: int, body: Callable[..., None], *args: Any) -> None:
    """body(rank, *args) in processes with a Gloo group."""
    run_processes(world, _body, world, free_port(), body, args)
