"""Parameters that the forward uses and the engine does not have: named and refused on all ranks, with nothing updated,
saved or counted. What only moved, or is put back, is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Block, Net, batch, config, engines, make, masters, micro, mse, run_ranks, same_bits
from torch import nn
from torch.nn.utils import parametrize, prune

import tessera
from tessera import checkpoints


class Model(Net):
    """With tied and frozen weights, and a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 3, bias=False)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.last.weight
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.scales = nn.ParameterList(torch.ones(3) for _ in range(2))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(super().features(x))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        out = super().forward(x)
        out = self.tied(self.last(out) * self.scales[0]) * self.scales[1]
        return out if y is None else ((out.float() - y) ** 2).mean()


def fresh(param: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.ones(param.shape, dtype=param.dtype), requires_grad=param.requires_grad)


def assign_state(model: Any) -> None:
    model.load_state_dict({name: fresh(p) for name, p in model.named_parameters(remove_duplicate=False)}, assign=True)


def plain(module: nn.Module, name: str = "weight") -> None:
    """Torch's setattr takes a tensor where nothing is registered."""
    other = fresh(getattr(module, name)).data
    delattr(module, name)
    setattr(module, name, other)


def buffer(module: nn.Module) -> None:
    other = fresh(module.weight).data
    del module.weight
    module.register_buffer("weight", other)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "assign=True": (assign_state, r"embed\.weight.*: replaced"),
    "attribute": (lambda m: setattr(m.head, "weight", fresh(m.head.weight)), r"head\.weight: replaced"),
    "one element": (lambda m: setattr(m, "gain", fresh(m.gain)), r"gain: replaced"),
    "tied": (lambda m: setattr(m.tied, "weight", fresh(m.tied.weight)), r"tied\.weight: replaced"),
    "tied later": (lambda m: setattr(m.blocks[0].linear, "weight", m.blocks[1].linear.weight), "weight: replaced"),
    "frozen": (
        lambda m: setattr(m.frozen, "weight", fresh(m.frozen.weight)),
        r"frozen\.weight: replaced after the engine was built, which saves what",
    ),
    "plain tensor": (lambda m: plain(m.head), r"head\.weight: replaced"),
    "tied, plain tensor": (lambda m: plain(m.tied), r"\btied\.weight: replaced"),
    "buffer": (lambda m: buffer(m.head), r"head\.weight: replaced"),
    "hidden": (lambda m: vars(m.head).update(weight=fresh(m.head.weight)), r"head\.weight: replaced"),
    "hidden module": (lambda m: vars(m).update(head=nn.Linear(7, 3)), r"head\.weight, head\.bias: replaced"),
    "list": (lambda m: m.scales.__setitem__(1, fresh(m.scales[1])), r"scales\.1: replaced"),
    "module": (lambda m: setattr(m, "head", nn.Linear(7, 3)), r"head\.weight, head\.bias: replaced"),
    "added": (lambda m: m.blocks.append(Block(7)), r"blocks\.2\.norm\.weight.*: added"),
    "dropped": (lambda m: m.blocks.__delitem__(0), r"blocks\.0\.norm\.weight.*: replaced"),
}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("action", REFUSED)
def test_parameters_of_others_are_refused(action: str, stage: int, tmp_path: Path) -> None:
    act, said = REFUSED[action]

    def body(engine: Any, rank: int) -> None:
        micro(engine, rank)
        before = masters(engine)
        act(engine.module)
        with pytest.raises(tessera.UsageError, match=rf"(?s)^\[engine\.step\] .*{said}"):
            micro(engine, rank)
        with pytest.raises(tessera.UsageError, match=said):
            engine.save_checkpoint(tmp_path)
        with pytest.raises(tessera.UsageError, match=said):
            tessera.step_together(engine)
        known = {spec.name: spec.tensor for spec in engine.core.params()}
        after = {name: tessera.state.get_full_fp32_param(engine, known[name]) for name in before}
        assert engine.core.global_steps() == 1 and same_bits(before, after)

    engines(make(Model), 2, config(stage, zero={"stage3_param_persistence_threshold": 8}), body)
    assert not (tmp_path / "latest").exists()


@pytest.mark.parametrize("stage", range(4))
def test_weights_are_neither_loaded_nor_written_where_one_rank_has_others(stage: int, tmp_path: Path) -> None:
    def body(engine: Any, rank: int) -> None:
        engine.save_checkpoint(tmp_path, asynchronous=True)
        micro(engine, rank)
        before, kept = masters(engine), engine.module.head.weight
        if rank == 1:
            engine.module.head.weight = fresh(kept)
        calls: dict[str, Callable[[], Any]] = {
            "load_checkpoint": lambda: engine.load_checkpoint(tmp_path),
            "save_16bit_model": lambda: engine.save_16bit_model(tmp_path),
        }
        for name, call in calls.items():
            with pytest.raises(tessera.UsageError, match=rf"^\[engine\.{name}\] head\.weight: replaced"):
                call()
        engine.module.head.weight = kept
        assert same_bits(before, masters(engine)) and not (tmp_path / "pytorch_model.bin").exists()
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 0 and engine.save_16bit_model(tmp_path)

    gathers = {"stage3_gather_16bit_weights_on_model_save": True}
    engines(make(Model), 2, config(stage, zero=gathers), body)


MODES: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "in the backward": {"tessera": {"update_in_backward": True}},
    "accumulation": {"gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", [1, 3])
def test_in_every_mode_of_one_rank(mode: str, stage: int) -> None:
    def body(engine: Any, rank: int) -> None:
        engine.module.head.weight = fresh(engine.module.head.weight)
        # What torch's backward raises is of torch's classes.
        kind = RuntimeError if mode == "in the backward" else tessera.UsageError
        with pytest.raises(kind, match=r"head\.weight: replaced"):
            for seed in range(2):
                micro(engine, seed)

    engines(make(), 1, config(stage) | MODES[mode], body)


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def wrap_last(model: Any) -> None:
    model.last = nn.Sequential(model.last)


def parametrize_head(model: Any) -> None:
    with tessera.zero.GatheredParameters(model.head.weight):
        parametrize.register_parametrization(model.head, "weight", Twice())


def without_bias(model: Any) -> None:
    del model.frozen.bias
    model.frozen.bias = None


def pruned(model: Any) -> None:
    with tessera.zero.GatheredParameters(model.head.weight):
        prune.identity(model.head, "weight")


SERVED: dict[str, Callable[[Any], Any]] = {
    "values": lambda m: m.load_state_dict(m.state_dict()),
    "wrapped": wrap_last,
    "parametrized": parametrize_head,
    "pruned": pruned,
    "without": without_bias,
    "removed": lambda m: m.frozen.register_parameter("unused", None),
    "put back": lambda m: (setattr(m.head, "weight", old := m.head.weight), setattr(m.head, "weight", old)),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("action", SERVED)
def test_what_moved_is_trained_as_before(action: str, stage: int) -> None:
    def body(engine: Any, rank: int) -> None:
        written = engine.module.parameters() if action == "values" else []
        with tessera.zero.GatheredParameters(written, modifier_rank=0):
            SERVED[action](engine.module)
        before = masters(engine)
        for seed in range(2):
            micro(engine, seed)
        assert all(not torch.equal(value, before[name]) for name, value in masters(engine).items())

    engines(make(Model), 2, config(stage), body)


def test_calls_with_other_parameters_go_on() -> None:
    def body(engine: Any, rank: int) -> None:
        others = {f"module.{name}": torch.zeros_like(p) for name, p in engine.module.named_parameters()}
        with torch.no_grad():
            assert not torch.func.functional_call(engine, others, (batch(0)[0],)).any()
        micro(engine, 0)

    engines(make(), 1, config(1), body)


def test_a_frozen_part_that_comes_later_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def body(engine: Any, rank: int) -> None:
        engine.module.teacher = nn.Linear(2, 2).requires_grad_(False)
        for seed in range(3):
            micro(engine, seed)

    engines(make(), 2, config(1), body)
    assert [r.message for r in caplog.records if "teacher" in r.message].__len__() == 1
    assert "teacher.weight, teacher.bias: frozen" in caplog.text


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", [1, 2])
def test_a_frozen_part_that_is_thawed_is_what_was_added(world: int, stage: int, tmp_path: Path) -> None:
    """As PEFT's add_adapter() and set_adapter()."""

    def loss(engine: Any, seed: int) -> torch.Tensor:
        x, y = batch(seed)
        return mse(engine.module.late(engine(x)), y)

    def body(engine: Any, rank: int) -> None:
        engine.module.late = late = nn.Linear(3, 3).requires_grad_(False)
        nn.init.eye_(late.weight)
        engine.backward(loss(engine, rank))
        engine.step()
        late.requires_grad_(True)
        for _ in range(2):
            engine.backward(loss(engine, rank))
            with pytest.raises(tessera.UsageError, match=r"late\.weight, late\.bias: added .* add_param_group"):
                engine.step()
        with pytest.raises(tessera.UsageError, match=r"late\.weight, late\.bias: added"):
            engine.save_checkpoint(tmp_path)
        assert engine.global_steps == 1
        engine.optimizer.add_param_group({"params": list(late.parameters())})
        with pytest.raises(tessera.UsageError, match=r"late\.\w+' began to require gradients.*zero_grad"):
            loss(engine, rank)
        engine.zero_grad()
        engine.backward(loss(engine, rank))
        engine.step()
        assert not torch.equal(late.weight, torch.eye(3))
        engine.save_checkpoint(tmp_path, tag="late")

    engines(make(), world, config(stage), body)
    assert "late.weight" in checkpoints.state_dict(tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_differs_is_named_on_all(stage: int) -> None:
    models = [make() for _ in range(2)]

    def body(rank: int, group: tessera.Group) -> None:
        engine = tessera.Engine(models[rank], config(stage), group=group)
        head = engine.module.head
        old = head._parameters["weight"]
        if rank == 1:
            head.weight = fresh(old)
        with pytest.raises(ValueError, match=r"ranks do not step alike: .*rank 1 has head\.weight: replaced"):
            micro(engine, rank)
        head.weight = old
        micro(engine, rank)
        assert engine.core.global_steps() == 1
        engine.destroy()

    run_ranks(2, body)
