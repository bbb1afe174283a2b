"""Layers that a program cuts itself: alone, in engines beside layers that rules cut, and their whole values."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support import Pair, config, make, masters, run_mesh
from torch import nn

import tessera
from tessera.parallel import WholeSlices, column_linear, row_linear

SKIP = {"layer_specs": [{"patterns": [".*"], "partition_type": "skip"}]}
FIRST = {
    "layer_specs": [
        {"patterns": [r"first\.up"], "partition_type": "column"},
        {"patterns": [r"first\.down"], "partition_type": "row"},
    ]
}


class Deep(nn.Module):
    """Two pairs of layers, of an odd width. Returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Pair(), Pair()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return self.first(x) + self.second(x)


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_alone_they_are_slices_of_the_layer(tp: int, gather: bool) -> None:
    """Outputs, input gradients and those of the slices; the bias of the row layer counts once."""
    up, down, x = make(nn.Linear, 6, 7), make(nn.Linear, 7, 4), inputs(0)
    want_x = x.clone().requires_grad_()
    hidden = up(want_x)
    out = down(torch.tanh(hidden))
    out.square().sum().backward()

    def body(rank: int, mesh: Any) -> None:
        group, mine_x = mesh.group(tessera.Axis.Tp), x.clone().requires_grad_()
        first = column_linear(copy.deepcopy(up), group, gather=gather)
        second = row_linear(copy.deepcopy(down), group)
        got_hidden = first(mine_x)
        got = second(torch.tanh(got_hidden))
        got.square().sum().backward()
        slices = torch.chunk(torch.arange(7), 3) if tp == 3 else torch.arange(7).split(-(-7 // tp))
        own = slices[rank] if tp != 3 else torch.arange(7).split([3, 2, 2])[rank]
        torch.testing.assert_close(got, out)
        torch.testing.assert_close(got_hidden, hidden if gather else hidden[:, own])
        torch.testing.assert_close(mine_x.grad, want_x.grad)
        torch.testing.assert_close(first.weight.grad, up.weight.grad[own])
        torch.testing.assert_close(first.bias.grad, up.bias.grad[own])
        torch.testing.assert_close(second.weight.grad, down.weight.grad[:, own])
        torch.testing.assert_close(second.bias.grad, down.bias.grad)
        assert first.out_features == second.in_features == len(own) and isinstance(first, nn.Linear)

    run_mesh(body, tp=tp)


def cut(model: Any, group: Any) -> None:
    column_linear(model.up, group)
    row_linear(model.down, group)
    column_linear(model.second.up, group)
    row_linear(model.second.down, group)


def train(engine: tessera.Engine, rank: int) -> dict[str, Any]:
    losses = []
    for step in range(3):
        loss = engine(inputs(step + 10 * (rank % 2)))
        loss.backward()
        engine.step()
        losses.append(loss.item())
    whole = {name: value.clone() for name, value in engine.module_state_dict().items()}
    return {"losses": losses, "norm": engine.global_grad_norm(), "masters": masters(engine), "whole": whole}


@pytest.mark.parametrize("rules", [None, SKIP, FIRST])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_trains_them_as_the_whole_model(stage: int, rules: dict[str, Any] | None) -> None:
    """Rules leave them as they are and cut others, or none; weights, norm and state dict are the whole model's."""
    cfg = config(stage) | {"gradient_clipping": 0.1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    model = make(Deep)

    def body(rank: int, mesh: Any) -> dict[str, Any]:
        mine = copy.deepcopy(model)
        more: dict[str, Any] = {}
        if mesh.size(tessera.Axis.Tp) > 1:
            cut(mine, mesh.group(tessera.Axis.Tp))
            more = {"tensor_parallel": {"autotp_size": 2} | ({"partition_config": rules} if rules else {})}
        engine = tessera.Engine(mine, cfg | more, group=mesh)
        try:
            return train(engine, mesh.rank([tessera.Axis.DpShard]))
        finally:
            engine.destroy()

    want = run_mesh(body, dp=2)[0]
    for got in run_mesh(body, dp=2, tp=2)[:2]:
        torch.testing.assert_close(got["losses"], want["losses"])
        torch.testing.assert_close(got["norm"], want["norm"])
        for kind in ("masters", "whole"):
            assert got[kind].keys() == want[kind].keys()
            for name, value in want[kind].items():
                torch.testing.assert_close(got[kind][name], value)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_whole_values_for_a_while(stage: int) -> None:
    """Whole inside, this rank's slice outside; what is written there stays, and is trained on."""
    model = make(Deep)
    value = model.up.weight.detach().clone()

    def body(rank: int, mesh: Any) -> None:
        mine = copy.deepcopy(model)
        cut(mine, mesh.group(tessera.Axis.Tp))
        settings: dict[str, Any] = config(stage) | {"tensor_parallel": {"autotp_size": 2, "partition_config": FIRST}}
        engine = tessera.Engine(mine, settings, group=mesh)
        params, shape = [mine.up.weight, mine.first.down.weight, mine.down.weight], mine.up.weight.shape
        with tessera.zero.GatheredParameters(params):
            before = [param.detach().clone() for param in params]
            with WholeSlices(params, mine):
                torch.testing.assert_close(mine.up.weight, value)
                torch.testing.assert_close(mine.first.down.weight, model.first.down.weight)
            assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True)) and mine.up.weight.shape == shape
        if stage < 3:
            with WholeSlices(mine.up.weight, mine), torch.no_grad():
                mine.up.weight.add_(1.0)
            torch.testing.assert_close(engine.module_state_dict()["up.weight"], value + 1)
            engine(inputs(0)).backward()
            engine.step()
            moved = engine.module_state_dict()["up.weight"] - value - 1
            assert 0 < moved.abs().max() < 0.1
        engine.destroy()

    run_mesh(body, tp=2)


def test_copies_and_pickles_of_them() -> None:
    models = [make(Deep) for _ in range(2)]

    def body(rank: int, mesh: Any) -> None:
        mine = models[rank]
        cut(mine, mesh.group(tessera.Axis.Tp))
        want = mine(inputs(0))
        settings = config(0) | {"tensor_parallel": {"autotp_size": 2, "partition_config": SKIP}}
        for other in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
            engine = tessera.Engine(other, settings, group=mesh)
            torch.testing.assert_close(engine(inputs(0)), want)
            assert engine.module_state_dict()["up.weight"].shape == (7, 6)
            engine.destroy()

    run_mesh(body, tp=2)


def test_what_does_not_fit_is_named() -> None:
    def body(rank: int, mesh: Any) -> None:
        group = mesh.group(tessera.Axis.Tp)
        with pytest.raises(ValueError, match="only linear layers"):
            column_linear(nn.LayerNorm(4), group)
        mine = make(Deep)
        cut(mine, group)
        with pytest.raises(ValueError, match="cut already"):
            row_linear(mine.up, group)
        with pytest.raises(ValueError, match=r"(?s)up was cut by hand, as rank . of 2.*autotp_size"):
            tessera.Engine(mine, config(0), group=tessera.single_group())

    run_mesh(body, tp=2)
