"""One order of blocking calls: an engine's hooks wait for no other rank at a moment that depends on this rank's graph.
So collectives of the user's own, and those of other engines, cannot meet an engine's in two orders."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support import Net, assert_close, batch, config, engines, full_grads, make, mse, plain_grads, run_ranks, weights
from torch import nn
from torch.utils.checkpoint import checkpoint

import tessera

STAGES = [0, 1, 2, 3]
SMALL_UNITS = {"min_unit_elements": 1}


class Barrier:
    """A second group of ranks as threads: all_reduce, which waits for all of them."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=20)
        self._values: dict[int, torch.Tensor] = {}

    def sum(self, rank: int, value: torch.Tensor) -> torch.Tensor:
        self._values[rank] = value
        self._barrier.wait()
        total = sum(self._values[r] for r in sorted(self._values))
        self._barrier.wait()
        assert isinstance(total, torch.Tensor)
        return total


class SumOfGradients(torch.autograd.Function):
    """The identity; its backward adds the gradients of all ranks, as tensor and sequence parallel layers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, barrier: Barrier, rank: int) -> torch.Tensor:
        ctx.barrier, ctx.rank = barrier, rank
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.barrier.sum(ctx.rank, grad), None, None


class Shifted(nn.Linear):
    """A linear layer with a shift that not every rank uses."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.shift = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor, shifts: bool = True) -> torch.Tensor:
        y = torch.tanh(super().forward(x))
        return y + self.shift if shifts else y


class Talks(nn.Module):
    """A collective of the user's between the layers, none of whose shifts rank 1 uses."""

    def __init__(self, barrier: Barrier) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Shifted(6) for _ in range(4))
        self.barrier = barrier

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for layer in self.layers:
            x = SumOfGradients.apply(x + layer(x, shifts=rank == 0), self.barrier, rank)
        return x.pow(2).mean()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_collective_of_the_users_inside_a_backward(stage: int, accumulation: int) -> None:
    barrier = Barrier(2)
    models = [make(Talks, barrier) for _ in range(2)]

    def body(rank: int, group: tessera.Group) -> Any:
        engine = tessera.Engine(models[rank], config(stage, accumulation, tessera=SMALL_UNITS), group=group)
        for step in range(3 * accumulation):
            engine(torch.full((2, 6), 0.1 * (rank + step)), rank).backward()
            engine.step()
        result = weights(engine.module)
        engine.destroy()
        return result

    first, second = run_ranks(2, body, timeout=20)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("stages", [(0, 0), (1, 2), (2, 2), (0, 1)])
def test_a_joint_loss_whose_forwards_ran_in_the_other_order_on_the_other_rank(stages: tuple[int, int]) -> None:
    models = [[make(seed=n) for n in range(2)] for _ in range(2)]
    want = [plain_grads(make(seed=n), 2, lambda m, rank: m(*batch(rank)).backward()) for n in range(2)]

    def body(rank: int, group: tessera.Group) -> Any:
        pair = [tessera.Engine(models[rank][n], config(stages[n], tessera=SMALL_UNITS), group=group) for n in range(2)]
        losses: dict[int, torch.Tensor] = {}
        for _ in range(3):
            for n in (0, 1) if rank == 0 else (1, 0):
                losses[n] = pair[n](*batch(rank))
            (losses[0] + losses[1]).backward()
            for n in (0, 1):
                assert_close(full_grads(pair[n]), want[n])
            for engine in pair:
                engine.zero_grad()
        for engine in pair:
            engine.destroy()

    run_ranks(2, body, timeout=20)


@pytest.mark.parametrize("stage", STAGES)
def test_reentrant_checkpoints_on_one_rank_only(stage: int) -> None:
    """A shared block gets gradients twice, once after its unit may have been launched."""

    def run(model: Any, module: Net, nested: bool) -> None:
        x, y = batch(0)
        hidden = module.embed(x)
        for block in (*module.blocks, module.blocks[0]):
            hidden = checkpoint(block, hidden, use_reentrant=True) if nested else block(hidden)
        mse(module.head(hidden), y).backward()

    def body(engine: tessera.Engine, rank: int) -> Any:
        for _ in range(2):
            engine.zero_grad()
            run(engine, engine.module, nested=rank == 1)
            grads = full_grads(engine)
            visible = {n: None if p.grad is None else p.grad.clone() for n, p in engine.module.named_parameters()}
        run(engine, engine.module, nested=rank == 1)  # several backwards of one step
        engine.step()
        return grads, visible

    want = plain_grads(make(), 2, lambda m, rank: run(m, m, False))
    for grads, visible in engines(make(), 2, config(stage, tessera=SMALL_UNITS), body):
        assert_close(grads, want)
        if stage == 0:
            assert_close(visible, want)


def test_the_pool_of_buckets_does_not_grow_where_nobody_is_late() -> None:
    def body(engine: tessera.Engine, rank: int) -> list[int]:
        peaks = []
        for step in range(20):
            engine(*batch(step)).backward()
            engine.step()
            peaks.append(engine.core.memory().peak_buckets)
        return peaks

    for peaks in engines(make(blocks=8), 2, config(2, tessera=SMALL_UNITS), body):
        largest = 192 * 4  # a block: 7, 7, 49 and 7 elements, aligned, padded for two ranks
        assert peaks[-1] <= 3 * largest, peaks


@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_may_end_anywhere_while_a_step_runs(stage: int) -> None:
    """A thread that drops the last grad_fn holds Python's lock, a client's step() waits for it inside the engine."""

    class Slow(torch.optim.SGD):
        kept: list[torch.Tensor]

        def step(self, closure: Any = None) -> Any:
            thread = threading.Thread(target=self.kept.clear, daemon=True)
            thread.start()
            thread.join(20)
            assert not thread.is_alive(), "the graph's hooks wait for the step"
            return super().step(closure)

    def body(engine: tessera.Engine, rank: int) -> None:
        for _ in range(2):
            engine(*batch(rank)).backward()
            engine.client_optimizer.kept = [engine(*batch(rank + 2))]
            engine.step()
            assert engine.was_step_applied() and not engine.client_optimizer.kept

    cfg = config(stage, bf16=True, zero_allow_untested_optimizer=True)
    engines(make(), 2, cfg, body, client=lambda params: Slow(params, lr=0.1))
