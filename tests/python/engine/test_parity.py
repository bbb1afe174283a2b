"""The whole grid against plain PyTorch in one process: stages, dtypes, ranks, accumulation, odd sizes.

fp32 agrees to within the order of summation, bf16 with a plain loop over the cast model and its fp32 masters to within
bf16's own rounding. Between stages of one world size the bits are the same.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support import assert_close, config, engines, masters, mse, plain_grads, same_bits, shard_group, weights
from torch import nn

import tessera

STEPS = 3
LR = 0.05


class Odd(nn.Module):
    """Parameters of 1, 3 and 17 elements, one without any, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.three = nn.Parameter(torch.tensor([0.1, -0.2, 0.3]))
        self.seventeen = nn.Parameter(torch.linspace(-1, 1, 17))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.unused = nn.Parameter(torch.ones(5))
        self.transposed = nn.Parameter(torch.arange(15.0).view(3, 5).t() / 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.to(self.one.dtype)
        hidden = torch.tanh(x @ self.transposed * self.three + self.one)
        wide = (hidden.sum(1, keepdim=True) * self.seventeen).sin().sum(1)
        return mse(hidden + wide[:, None] + self.empty.sum(), y)


def data(rank: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + k)
    return torch.randn(2, 5, generator=generator), torch.randn(2, 3, generator=generator)


def plain(model: nn.Module, world: int, accumulation: int, bf16: bool) -> dict[str, Any]:
    """The masters of a plain loop: they start from the cast weights, torch accumulates the gradients."""
    cast = copy.deepcopy(model).to(torch.bfloat16 if bf16 else torch.float32)
    model = copy.deepcopy(cast).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    for step in range(STEPS):
        cast.load_state_dict(model.state_dict())
        grads = plain_grads(
            cast,
            world,
            lambda m, rank, s=step: [m(*data(rank, s * accumulation + k)).backward() for k in range(accumulation)],
            scale=1 / accumulation,
        )
        for name, param in model.named_parameters():
            param.grad = grads[name]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return weights(model)


def ours(model: nn.Module, stage: int, world: int, accumulation: int, bf16: bool, **zero: Any) -> list[dict[str, Any]]:
    def body(engine: tessera.Engine, rank: int) -> Any:
        for k in range(STEPS * accumulation):
            engine(*data(rank, k)).backward()
            engine.step()
        assert engine.global_steps == STEPS
        return {**{f"master {name}": value for name, value in masters(engine).items()}, **weights(engine.module)}

    cfg = config(
        stage,
        accumulation,
        bf16,
        zero,
        gradient_clipping=0.5,
        optimizer={"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
    )
    return engines(model, world, cfg, body)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_grid(world: int, bf16: bool, accumulation: int, tmp_path: Path) -> None:
    model = Odd()
    want = plain(model, world, accumulation, bf16)
    stages = [ours(model, stage, world, accumulation, bf16) for stage in (0, 1, 2, 3)]
    for results in stages:
        for rank in range(world):
            assert all(torch.equal(results[rank][name], results[0][name]) for name in results[0]), "ranks agree"
        if not bf16:
            assert_close({name: results[0][name] for name in want}, want)
        else:
            for name in want:
                master = results[0][f"master {name}"]
                assert torch.equal(master.bfloat16(), results[0][name])
                # An Adam step moves by lr whatever the gradient's size: 1% of it for the gradient's rounding.
                torch.testing.assert_close(master, want[name], rtol=0, atol=0.01 * STEPS * LR)
    # Stage 2 adds over ranks first and over micro-batches then, stages 0 and 1 the other way round.
    same = [stages[1]] if accumulation > 1 and world > 1 else stages[1:]
    for results in same:
        assert all(torch.equal(results[0][name], stages[0][0][name]) for name in want)
    assert all(torch.equal(stages[3][0][name], stages[2][0][name]) for name in want)
    # Where states live changes no bit.
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    for stage in (1, 2, 3) if world < 3 else ():
        params = {"offload_param": offload | {"max_in_cpu": 0}} if stage == 3 else {}
        for more in ({}, params) if params else ({},):
            results = ours(model, stage, world, accumulation, bf16, offload_optimizer=offload, **more)
            assert all(torch.equal(results[0][name], value) for name, value in stages[stage][0].items())


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bucket_size_does_not_change_a_bit(stage: int, world: int) -> None:
    def run(**zero: Any) -> Any:
        def body(engine: tessera.Engine, rank: int) -> Any:
            for k in range(2):
                engine(*data(rank, k)).backward()
                engine.step()
            return weights(engine.module)

        # Stage 3 with the persistence threshold of the defaults.
        cfg = config(stage, zero_optimization={"stage": stage, **zero}, tessera={"min_unit_elements": 1})
        return engines(Odd(), world, cfg, body)[0]

    want = run()
    for size in (1, 17, 40):
        got = run(reduce_bucket_size=size)
        assert same_bits(got, want)
    got = run(overlap_comm=False)
    assert same_bits(got, want)


def test_collectives_of_a_step() -> None:
    """Stage 2 moves each gradient once by reduce-scatter and each parameter once by all-gather."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(2)])
    elements = sum(p.numel() for p in model.parameters())

    def body(engine: tessera.Engine, rank: int) -> Any:
        shard_group(engine).reset_stats()
        engine(torch.ones(2, 64)).sum().backward()
        after_backward = shard_group(engine).stats()
        engine.step()
        after_step = shard_group(engine).stats()
        return after_backward, after_step

    for before, after in engines(model, 2, config(2), body):
        assert before.reduce_scatter.bytes == pytest.approx(elements * 4 / 2, rel=0.02)
        assert before.all_reduce.calls == 0 and before.all_gather.calls == 0
        assert after.all_gather.bytes == pytest.approx(elements * 4 / 2, rel=0.05)


def test_memory_is_the_formula() -> None:
    """Bytes an element: compute parameters + gradients + master + moments, sharded as the stage says."""
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    elements = sum(p.numel() for p in model.parameters())

    def body(engine: tessera.Engine, rank: int) -> Any:
        for _ in range(2):
            assert engine.core.memory().grads == 0
            engine(torch.ones(2, 256, dtype=torch.bfloat16)).sum().backward()
            held = engine.core.memory()
            engine.step()
        return held

    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    for stage, share in ((0, 1), (1, 2), (2, 2), (3, 2)):
        for memory in engines(model, 2, config(stage, bf16=True, optimizer=adam), body):
            assert memory.params == pytest.approx(2 * elements / (share if stage == 3 else 1), rel=0.05)
            assert memory.master == pytest.approx(2 * elements / share, rel=0.05)
            assert memory.states == pytest.approx(8 * elements / share, rel=0.05)
            assert memory.grads == pytest.approx(2 * elements / share, rel=0.05)
