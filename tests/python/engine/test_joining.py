"""Parameters that begin, or cease, to be trained while the engine lives: as plain PyTorch trains them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    OPTIMIZERS,
    Net,
    assert_close,
    batch,
    config,
    engines,
    make,
    masters,
    micro,
    mse,
    run_ranks,
    same_bits,
)
from torch import nn

import tessera

STEPS = 10
RATE = {"lr": 0.02}


def half_frozen() -> nn.Module:
    model = make(Net)
    for param in (*model.blocks[0].parameters(), *model.head.parameters(), model.gain):
        param.requires_grad_(False)
    return model


def change(k: int, model: nn.Module, optimizer: torch.optim.Optimizer, extra: nn.Parameter) -> None:
    """What a script does before step `k`."""
    if k == 2:
        model.blocks[0].linear.weight.requires_grad_(True)
        model.head.requires_grad_(True)
    if k == 4:
        model.embed.requires_grad_(False)
    if k == 5:
        model.gain.requires_grad_(True)
        optimizer.add_param_group({"params": [model.gain, extra], **RATE})
    if k == 7:
        model.embed.requires_grad_(True)
        model.blocks[0].norm.requires_grad_(True)


def loss_of(model: Any, rank: int, k: int, extra: torch.Tensor) -> torch.Tensor:
    x, y = batch(100 * rank + k)
    return mse(model(x) * extra, y)


def plain(factory: Any, world: int, accumulation: int) -> dict[str, torch.Tensor]:
    model, extra = half_frozen(), nn.Parameter(torch.ones(3))
    optimizer = factory([p for p in model.parameters() if p is not model.gain])
    for k in range(STEPS):
        change(k, model, optimizer, extra)
        for rank in range(world):
            for m in range(accumulation):
                factor = extra if k >= 5 else extra.detach()
                (loss_of(model, rank, 10 * k + m, factor) / (world * accumulation)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()} | {"extra": extra.detach().clone()}


def trained(engine: Any, rank: int, accumulation: int, optimizer: Any = None) -> dict[str, torch.Tensor]:
    extra = nn.Parameter(torch.ones(3))
    for k in range(STEPS):
        change(k, engine.module, optimizer or engine.optimizer, extra)
        for m in range(accumulation):
            engine.backward(loss_of(engine, rank, 10 * k + m, extra if k >= 5 else extra.detach()))
            engine.step()
    values = engine.module_state_dict()
    return {name: value.detach().float().clone() for name, value in values.items()} | {"extra": extra.detach().float()}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", ["adamw", "momentum", "rmsprop", "amsgrad"])
@pytest.mark.parametrize("world", [1, 2])
def test_as_in_plain_pytorch(kind: str, stage: int, world: int) -> None:
    """With a client's optimizer, that holds what is frozen, too."""
    want = plain(OPTIMIZERS[kind], world, 2)
    cfg = config(stage, accumulation=2, zero_allow_untested_optimizer=True)
    models = [half_frozen() for _ in range(world)]

    def body(rank: int, group: Any) -> Any:
        model = models[rank]
        client = OPTIMIZERS[kind]([p for p in model.parameters() if p is not model.gain])
        engine = tessera.Engine(model, cfg, optimizer=client, group=group)
        values = trained(engine, rank, 2, client)
        engine.destroy()
        owned = {id(p) for g in client.param_groups for p in g["params"]}
        assert {id(p) for p in model.parameters()} <= owned
        return values

    for got in run_ranks(world, body):
        assert_close(got, want)


MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "offload": {"zero": {"offload_optimizer": {"device": "nvme"}}},
    "offload all": {"zero": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}},
    "shared": {"tessera": {"shared_parameters": True}},
    "in backward": {"tessera": {"update_in_backward": True}},
    "unmanaged": {"managed_gradient_accumulation": False},
    "lamb": {"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}},
}


ADAM = {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.01}}


def serves(mode: str, stage: int) -> bool:
    return stage == 3 or (mode != "offload all" and (stage > 0 or mode not in ("offload", "shared", "in backward")))


@pytest.mark.parametrize(("mode", "stage"), [(m, s) for m in MODES for s in range(4) if serves(m, s)])
def test_from_the_configuration_in_every_mode(mode: str, stage: int, tmp_path: Path) -> None:
    """As plain PyTorch, or, where that has no such optimizer, stage 0."""

    def settings(stage: int) -> dict[str, Any]:
        more: dict[str, Any] = {"optimizer": ADAM} | MODES[mode]
        for section in more.get("zero", {}).values():
            section["nvme_path"] = str(tmp_path)
        return config(stage, **more)

    def body(engine: Any, rank: int) -> Any:
        return trained(engine, rank, 1)

    want = engines(half_frozen(), 2, settings(0), body)[0] if mode == "lamb" else plain(OPTIMIZERS["adamw"], 2, 1)
    for got in engines(half_frozen(), 2, settings(stage), body):
        assert_close(got, want, bf16=mode in ("bf16", "fp16"))


@pytest.mark.parametrize("stage", range(4))
def test_muon_keeps_matrices_apart(stage: int) -> None:
    """What is thawed joins the group whose rule is its own."""

    def body(engine: Any, rank: int) -> Any:
        engine.module.head.requires_grad_(True)
        for k in range(3):
            engine.backward(loss_of(engine, rank, k, torch.ones(3)))
            engine.step()
        return {group["use_muon"]: len(group["params"]) for group in engine.optimizer.param_groups}

    muon = {"type": "Muon", "params": {"lr": 0.01}}
    cfg = config(stage, optimizer=muon, zero={"reduce_scatter": False})
    assert engines(half_frozen(), 1, cfg, body) == [{True: 2, False: 6}]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", [None, "adamw", "rmsprop"])
@pytest.mark.parametrize("form", ["tessera", "deepspeed"])
def test_checkpoints(form: str, kind: str | None, stage: int, tmp_path: Path) -> None:
    """Of a run where it has joined, in one where it is trained from the start, and the other way round; thawed before
    the load, it goes on with what was saved."""
    client = None if kind is None else OPTIMIZERS[kind]
    more = {"optimizer": ADAM} if kind is None else {}
    cfg = config(stage, zero_allow_untested_optimizer=True, checkpoint={"format": form}, **more)

    def steps(engine: Any, rank: int, first: int, count: int) -> dict[str, torch.Tensor]:
        for k in range(first, first + count):
            engine(*batch(10 * rank + k)).backward()
            engine.step()
        return masters(engine)

    def save(engine: Any, rank: int) -> Any:
        steps(engine, rank, 0, 2)
        engine.module.requires_grad_(True)
        steps(engine, rank, 2, 1)
        engine.save_checkpoint(tmp_path)
        return steps(engine, rank, 3, 2)

    def load(engine: Any, rank: int) -> Any:
        engine.module.requires_grad_(True)
        engine.load_checkpoint(tmp_path)
        return steps(engine, rank, 3, 2)

    for first, second in (
        (half_frozen(), make(Net, seed=5)),
        (make(Net), half_frozen()),
        (half_frozen(), half_frozen()),
    ):
        want = engines(first, 2, cfg, save, client)
        for got in engines(second, 2, cfg, load, client):
            assert_close(got, want[0])


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("what", ["thawed", "frozen", "added"])
def test_ranks_that_differ(what: str, stage: int) -> None:
    def body(rank: int, group: Any) -> str:
        model = half_frozen()
        engine = tessera.initialize(model=model, config=config(stage), engine_type=of_group(group))[0]
        if rank == 1:
            if what == "added":
                engine.optimizer.add_param_group({"params": [model.gain.requires_grad_(True)]})
            else:
                (model.head.bias if what == "thawed" else model.embed.bias).requires_grad_(what == "thawed")
        engine(*batch(rank)).backward()
        with pytest.raises(ValueError, match="ranks do not step alike") as refused:
            engine.step()
        assert engine.global_steps == 0
        return str(refused.value)

    name = {"thawed": "head.bias", "frozen": "embed.bias", "added": "param group 1"}[what]
    texts = run_ranks(2, body)
    assert all(name in text for text in texts), texts


def of_group(group: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: tessera.Engine(*args, **(kwargs | {"group": group}))


def test_a_warning_names_what_is_thawed_and_in_no_group() -> None:
    model = half_frozen()
    own = [p for p in model.parameters() if p.requires_grad]
    engine = tessera.Engine(model, config(1), optimizer=torch.optim.SGD(own, lr=0.1))
    model.head.bias.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"'head\.bias': requires gradients now.*add_param_group"):
        engine(*batch(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine(*batch(0)).backward()
        engine.optimizer.add_param_group({"params": [model.head.bias]})
        with pytest.raises(tessera.UsageError, match=r"head\.bias' .* before the first backward of an update"):
            engine(*batch(0))  # what it got for this update was not scaled as that of the others
        engine.zero_grad()
        before = model.head.bias.detach().clone()
        engine(*batch(0)).backward()
        engine.step()
    assert not torch.equal(model.head.bias, before)
    engine.optimizer.add_param_group({"params": [model.gain]})
    with pytest.raises(RuntimeError, match="is in another one"):
        engine.optimizer.param_groups[0]["params"].append(model.gain)
        engine(*batch(0)).backward()
        engine.step()
    engine.destroy()


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_of_the_first_step_are_clipped(world: int, stage: int) -> None:
    """By hand, too."""

    def body(engine: Any, rank: int) -> None:
        extra = nn.Parameter(torch.ones(3))
        engine.backward(loss_of(engine, rank, 0, extra.detach()))
        engine.step()
        engine.module.head.requires_grad_(True)
        engine.optimizer.add_param_group({"params": [extra], **RATE})
        engine.backward(loss_of(engine, rank, 1, extra))
        had = engine.clip_grad_norm_(1e-3).item()
        params = [*engine.module.head.parameters(), extra]
        assert had > 1e-2 and engine.grad_norm() == pytest.approx(1e-3, rel=1e-3)
        for param in params:
            assert tessera.state.get_full_grad(engine, param).norm() <= 1.001e-3
        engine.step()

    engines(half_frozen(), world, config(stage, lr=0.02), body)


BEFORE: dict[str, dict[str, Any]] = {"fp32": {}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("mode", BEFORE)
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_from_before_a_group_has_it_do_not_count(world: int, mode: str, stage: int) -> None:
    """Those of thawed parameters go with every step, as all others; and a step that overflows leaves nothing."""

    def body(engine: Any, rank: int) -> None:
        head, stranger = engine.module.head, nn.Parameter(torch.ones(3))

        def backward(seed: int, factor: float = 1.0) -> None:
            engine.backward(loss_of(engine, rank, seed, stranger) * factor)

        head.requires_grad_(True)
        for seed, factor in enumerate((1.0, 1e30 if mode == "fp16" else 1.0, 1.0)):
            backward(seed, factor)
            engine.step()
            assert head.weight.grad is None and head.bias.grad is None
        skipped = engine.skipped_steps
        assert skipped == (mode == "fp16") and stranger.grad is not None
        engine.optimizer.add_param_group({"params": [*head.parameters(), stranger], **RATE})
        if stage % 2:
            assert tessera.state.get_full_fp32_param(engine, stranger) is not None, "it joins here"
        want = plain_grads(engine, stranger, 4, world)
        backward(4)
        for param, value in want.items():
            got = tessera.state.get_full_grad(engine, param) / engine.loss_scaler.loss_scale
            torch.testing.assert_close(got, value, rtol=2e-2 if mode == "fp16" else 1e-4, atol=1e-3)
        engine.step()
        assert engine.skipped_steps == skipped

    def client(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in params if p.requires_grad], lr=0.1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engines(half_frozen(), world, config(stage, **BEFORE[mode]), body, client)


def plain_grads(engine: Any, stranger: torch.Tensor, seed: int, world: int) -> dict[torch.Tensor, torch.Tensor]:
    """Of the head and `stranger`."""
    with tessera.zero.GatheredParameters(list(engine.module.parameters())):
        model = copy.deepcopy(engine.module).float()
    other = nn.Parameter(stranger.detach().float().clone())
    for rank in range(world):
        (loss_of(model, rank, seed, other) / world).backward()
    of = {engine.module.head.weight: model.head.weight, engine.module.head.bias: model.head.bias, stranger: other}
    return {param: plain.grad for param, plain in of.items() if plain.grad is not None}


def double(model: Any) -> list[torch.Tensor]:
    return list(nn.Linear(3, 3).double().parameters())


def of_its_memory(model: Any) -> list[torch.Tensor]:
    return [nn.Parameter(model.embed.weight.detach())]


REFUSED: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "momentum": (lambda m: {"params": [m.gain], "momentum": 0.9}, "has momentum, .*momentum 0, or destroy"),
    "double": (lambda m: {"params": double(m)}, r"is Double.*convert it to fp32.*was not added.*\(3, 3\), \(3,\)"),
    "in the model": (lambda m: {"params": [m.odd.requires_grad_(True)]}, "'odd' begins to be trained and is Double"),
    "complex": (
        lambda m: {"params": [m.turns.requires_grad_(True)]},
        "'turns' is ComplexFloat, which is not trained in",
    ),
    "twice": (lambda m: {"params": [m.gain, m.embed.bias]}, "more than one"),
    "memory": (lambda m: {"params": of_its_memory(m)}, "lies in the memory of 'embed.weight'"),
    "rate": (lambda m: {"params": [m.gain], "lr": torch.tensor(0.1)}, "a rate that is no number"),
}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("world", [1, 2])
def test_a_group_that_is_refused_is_not_added(world: int, kind: str, stage: int, tmp_path: Path) -> None:
    group_of, said = REFUSED[kind]
    model = half_frozen()
    model.odd = nn.Parameter(torch.ones(2, dtype=torch.double), requires_grad=False)
    model.turns = nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False)

    def body(engine: Any, rank: int, tries: bool) -> dict[str, torch.Tensor]:
        optimizer = engine.optimizer
        micro(engine, rank)
        for _ in range(2 if tries else 0):
            before = optimizer.param_groups[:]
            with pytest.raises(ValueError, match=said):
                optimizer.add_param_group(group_of(engine.module))
            assert optimizer.param_groups == before
            engine.module.odd.requires_grad_(False)
            engine.module.turns.requires_grad_(False)
        micro(engine, rank + 1)
        optimizer.add_param_group({"params": [engine.module.gain.requires_grad_(True)], "lr": 0.2})
        micro(engine, rank + 2)
        engine.save_checkpoint(tmp_path / str(tries))
        return masters(engine)

    def client(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in params if p.requires_grad], lr=0.1)

    want, got = (engines(model, world, config(stage), lambda *a, t=t: body(*a, t), client) for t in (False, True))
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    assert "gain" in got[0]


@pytest.mark.parametrize("stage", range(4))
def test_groups_that_are_taken_out(stage: int, tmp_path: Path) -> None:
    def body(engine: Any, rank: int) -> None:
        optimizer = engine.optimizer
        optimizer.add_param_group({"params": [engine.module.gain.requires_grad_(True)], "lr": 0.2})
        engine(*batch(rank)).backward()
        taken = optimizer.param_groups.pop()
        for call in (engine.step, engine.grad_norm, lambda: engine.save_checkpoint(tmp_path)):
            with pytest.raises(tessera.UsageError, match="after the engine was built; put them back"):
                call()
        optimizer.param_groups.append(taken)
        engine.step()
        assert engine.module.gain.detach() != 1.5

    engines(half_frozen(), 1, config(stage), body)
