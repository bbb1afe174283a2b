"""Copies of partitioned parameters, and parameters that a module takes in its first forward."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    Net,
    assert_close,
    batch,
    config,
    engines,
    gathered,
    make,
    mse,
    one_backward,
    run_ranks,
    same_gradients,
)
from torch import nn

import tessera


@pytest.mark.parametrize("stage", range(4))
def test_a_copy_is_whole_and_of_nobody(stage: int) -> None:
    def body(engine: Any, rank: int) -> None:
        for part in (engine.module, engine.module.blocks[0], engine.module.head.weight):
            copied = copy.deepcopy(part)
            made = [copied] if isinstance(copied, nn.Parameter) else list(copied.parameters())
            old = [part] if isinstance(part, nn.Parameter) else list(part.parameters())
            with tessera.zero.GatheredParameters(old):
                for a, b in zip(made, old, strict=True):
                    assert type(a) is type(b) and a is not b and torch.equal(a, b)
            assert all(tessera.zero.partition_info(p) is None and not vars(p) for p in made)
        assert stage < 3 or gathered(engine) == []
        copied = copy.deepcopy(engine.module)
        copied(*batch(rank)).backward()
        assert copied.head.weight.grad is not None
        one_backward(engine, rank)
        engine.step()

    engines(make(), 2, config(stage), body)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_what_is_saved_of_a_living_engines_module_is_plain(stage: int, early: bool, tmp_path: Path) -> None:
    """torch.load() takes it with weights_only; an attribute of the client's comes along."""

    def body(rank: int, group: tessera.Group) -> None:
        cfg = config(stage)
        with tessera.zero.Init(config=cfg, group=group, enabled=early):
            model: Any = Net()
        model.head.weight.note = "mine"
        engine = tessera.Engine(model, cfg, group=group)
        params = dict(engine.module.named_parameters())
        with tessera.zero.GatheredParameters(params.values()):
            torch.save({**engine.module.state_dict(keep_vars=True), "one": params["gain"]}, tmp_path / str(rank))
            plain = pickle.loads(pickle.dumps(params["embed.weight"]))
            loaded = torch.load(tmp_path / str(rank), weights_only=True)
            for name, param in [*params.items(), ("one", params["gain"])]:
                assert type(loaded[name]) is nn.Parameter and torch.equal(loaded[name], param)
                assert vars(loaded[name]) == ({"note": "mine"} if name == "head.weight" else {})
            assert torch.equal(plain, params["embed.weight"]) and vars(plain) == {}
        torch.testing.assert_close(copy.deepcopy(loaded["gain"]), loaded["gain"])
        one_backward(engine, rank)
        engine.step()
        engine.destroy()

    run_ranks(2, body)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
def test_layers_that_are_replicated_before_there_is_an_engine(stage: int, shares: bool) -> None:
    """As PEFT's layer_replication: a copy of a layer, which takes the parameters of the layer that was copied."""

    def replicate(model: Any) -> None:
        made = copy.deepcopy(model.blocks[0])
        for name, module in model.blocks[0].named_modules() if shares else ():
            for own, param in module.named_parameters(recurse=False):
                made.get_submodule(name).register_parameter(own, param)
        model.blocks.append(made)

    plain = make()
    values = copy.deepcopy(plain.state_dict())
    replicate(plain)
    loss = sum(plain(*batch(rank)) for rank in range(2)) / 2
    loss.backward()
    want = {name: param.grad for name, param in plain.named_parameters()}

    def body(rank: int, group: tessera.Group) -> None:
        cfg = config(stage)
        with tessera.zero.Init(config=cfg, group=group):
            model: Any = Net()
        with tessera.zero.GatheredParameters(model.parameters(), modifier_rank=0):
            model.load_state_dict(values)
        replicate(model)
        engine = tessera.Engine(model, cfg, group=group)
        one_backward(engine, rank)
        got = {name: tessera.state.get_full_grad(engine, param) for name, param in model.named_parameters()}
        assert_close(got, want)
        engine.destroy()

    run_ranks(2, body)


class Around(nn.Module):
    """Without parameters of its own: AdaLoRA's penalty, which reads those of others."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.inner = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = mse(self.inner.forward(x), y)
        for name, param in self.inner.named_parameters():
            if name.endswith("weight"):
                loss = loss + self.penalty(param)
        return loss

    def penalty(self, param: torch.Tensor) -> torch.Tensor:
        if self.way == "registered":
            tessera.zero.register_external_parameter(self, param)
        elif self.way == "gathered":
            with tessera.zero.GatheredParameters(param, fwd_module=self):
                return (param @ param.T - 1).norm()
        elif self.way == "to be written":
            with tessera.zero.GatheredParameters(param, modifier_rank=0, fwd_module=self):
                return (param @ param.T - 1).norm()
        return (param @ param.T - 1).norm()


class Outer(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.around = Around(way)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.around(x, y) * self.gain


@pytest.mark.parametrize("way", ["registered", "gathered", "to be written"])
@pytest.mark.parametrize("stage", range(4))
def test_a_parameter_taken_in_the_first_forward(way: str, stage: int) -> None:
    def pattern(model: Any, rank: int) -> None:
        for k in range(2):
            model(*batch(rank + k)).backward()

    def then(engine: Any, rank: int) -> None:
        assert stage < 3 or gathered(engine) == []
        engine.step()

    cfg = config(stage, tessera={"min_unit_elements": 1})

    def plain(model: Any, rank: int) -> None:
        model.around.way = ""
        pattern(model, rank)

    same_gradients(make(Outer, way), 2, cfg, pattern, plain, then)
