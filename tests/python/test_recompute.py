"""Recomputation: gradients are plain PyTorch's, inputs are kept where they should be, random draws repeat."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import config, engines, make, run_ranks
from tessera.recompute import RandomStates, Recompute
from torch import nn

import tessera


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 64), nn.Linear(64, 5)

    def forward(self, x: torch.Tensor, drop: float = 0.0) -> torch.Tensor:
        return x + self.down(nn.functional.dropout(torch.tanh(self.up(x)), drop))


def gradients(call: Any, model: nn.Module, drop: float = 0.0) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 30).view(6, 5).requires_grad_()
    y = x * 2
    for _ in range(2):
        y = call(model, y, drop)
    y.square().sum().backward()
    assert x.grad is not None
    found = [x.grad] + [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def plainly(function: Any, *args: Any) -> Any:
    return function(*args)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_gradients_are_those_without_it(offload: bool, named: bool) -> None:
    model = make(Wide)
    for a, b in zip(
        gradients(Recompute(offload=offload, named=named, synchronize=True), model),
        gradients(plainly, model),
        strict=True,
    ):
        assert torch.equal(a, b)


def saved_bytes(call: Any) -> int:
    """What the graph of one call keeps, by storage."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model, x = make(Wide), torch.ones(6, 5, requires_grad=True) * 1
    params = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = call(model, x)
    assert out.requires_grad
    return sum(size for where, size in kept.items() if where not in params)


def test_it_keeps_the_inputs_only() -> None:
    assert saved_bytes(Recompute()) == 6 * 5 * 4 < saved_bytes(plainly)


def test_slices_are_cut_and_joined() -> None:
    model = make(Wide)
    expected = gradients(plainly, model)

    def body(rank: int, group: tessera.Group) -> None:
        call = Recompute(slices=group)
        for a, b in zip(gradients(call, copies[rank]), expected, strict=True):
            assert torch.equal(a, b)
        x = torch.ones(3, 5, requires_grad=True) * 1  # 15 elements over the ranks: padded
        assert torch.equal(call(model, x), model(x))

    copies = [copy.deepcopy(model) for _ in range(3)]  # seeds are of the process, ranks are threads
    for world in (2, 3):
        run_ranks(world, body)


def test_draws_repeat_in_the_recomputation() -> None:
    def run(call: Any, states: RandomStates) -> list[torch.Tensor]:
        torch.manual_seed(3)
        states.clear()
        states.add("a", 7)
        model = make(Wide)

        def drawing(x: torch.Tensor) -> torch.Tensor:
            with states.fork("a"):
                return model(x, 0.5)

        x = torch.ones(6, 5, requires_grad=True)
        y = call(drawing, call(drawing, x))
        y.sum().backward()
        assert x.grad is not None
        return [y.detach(), x.grad, states.states["a"]]

    states = RandomStates()
    for a, b in zip(run(Recompute(random=states), states), run(plainly, states), strict=True):
        assert torch.equal(a, b)


def test_errors_of_random_states() -> None:
    states = RandomStates()
    states.add("a", 1)
    with pytest.raises(ValueError, match="seed 1 already"):
        states.add("b", 1)
    with pytest.raises(ValueError, match="a already"):
        states.add("a", 2)
    with pytest.raises(ValueError, match="b is not added"), states.fork("b"):
        pass
    before = torch.get_rng_state()
    with states.fork("a"):
        torch.rand(3)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_reads_its_section(stage: int) -> None:
    section = {"cpu_checkpointing": True, "profile": True}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Wide() for _ in range(2))
            self.call: Any = plainly

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = self.call(block, x)
            return x.square().mean()

    def grads(engine: tessera.Engine, rank: int, recompute: bool) -> list[torch.Tensor | None]:
        if recompute:
            engine.module.call = engine.recompute
        engine(torch.linspace(-1, 1, 30).view(6, 5) * (rank + 1)).backward()
        return [tessera.state.get_full_grad(engine, p) for p in engine.module.parameters()]

    model, cfg = make(Net), config(stage, activation_checkpointing=section)
    plain = engines(model, 2, cfg, lambda engine, rank: grads(engine, rank, False))
    again = engines(model, 2, cfg, lambda engine, rank: grads(engine, rank, True))
    for a, b in zip(plain[0], again[0], strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


def test_partitioned_inputs_of_an_engine_lie_along_tp() -> None:
    cfg = config(1, activation_checkpointing={"partition_activations": True})

    def body(engine: tessera.Engine, rank: int) -> float:
        group = engine.core.mesh().group(tessera.Axis.Tp)
        before = group.stats().all_gather.calls
        engine.recompute(engine.module, torch.ones(6, 5, requires_grad=True) * 1).sum().backward()
        return group.stats().all_gather.calls - before

    assert all(calls > 0 for calls in engines(make(Wide), {"tp": 2}, cfg, body))
