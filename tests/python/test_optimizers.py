"""Optimizers: native and external, the client's and configured ones, their states, groups and schedules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import Net, assert_close, batch, config, engines, make, plain_grads, weights
from torch import nn

import tessera

STAGES = [0, 1, 2]
Factory = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Factory] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6),
    "adam maximize": lambda p: torch.optim.Adam(p, lr=0.01, maximize=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.2),
    # Run by themselves on the masters:
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
}
EXTERNAL = ("amsgrad", "tensor lr", "rmsprop", "adamax")


def train_plain(model: nn.Module, factory: Factory, world: int, steps: int) -> torch.optim.Optimizer:
    optimizer = factory(model.parameters())
    for k in range(steps):
        grads = plain_grads(model, world, lambda m, rank, k=k: m(*batch(10 * rank + k)).backward())
        for name, param in model.named_parameters():
            param.grad = grads[name]
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def run(engine: Any, rank: int, steps: int) -> None:
    for k in range(steps):
        engine(*batch(10 * rank + k)).backward()
        engine.step()


def by_name(model: nn.Module, factory: Factory) -> Callable[[Any], torch.optim.Optimizer]:
    """A client's optimizer object for a copy of the model."""
    return lambda copied: factory(copied.parameters())


def with_client(
    model: nn.Module, world: int, cfg: dict[str, Any], factory: Factory, body: Callable[[Any, Any, int], Any]
) -> list[Any]:
    from support import run_ranks

    copies = [copy.deepcopy(model) for _ in range(world)]

    def on_rank(rank: int, group: tessera.Group) -> Any:
        client = factory(copies[rank].parameters())
        engine = tessera.Engine(copies[rank], cfg, optimizer=client, group=group)
        try:
            return body(engine, client, rank)
        finally:
            engine.destroy()

    return run_ranks(world, on_rank)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_client_optimizers_equal_plain_torch(kind: str, stage: int, world: int) -> None:
    model = make()
    plain = copy.deepcopy(model)
    train_plain(plain, OPTIMIZERS[kind], world, 4)

    def body(engine: tessera.Engine, client: Any, rank: int) -> Any:
        assert engine.basic_optimizer is client
        assert engine.optimizer.param_groups is client.param_groups
        assert (engine.optimizer is client) == (stage == 0)
        run(engine, rank, 4)
        return weights(engine.module)

    cfg = config(stage, zero_allow_untested_optimizer=True)
    for got in with_client(model, world, cfg, OPTIMIZERS[kind], body):
        for name, value in weights(plain).items():
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["adamw", "momentum", "rmsprop"])
def test_bf16_masters(kind: str, stage: int) -> None:
    """The masters start exact and are updated in fp32: small steps that bf16 cannot hold add up."""
    model = make()
    factory: Factory = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-5, weight_decay=0.0),
        "momentum": lambda p: torch.optim.SGD(p, lr=1e-5, momentum=0.9),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-5),
    }[kind]

    def body(engine: tessera.Engine, client: Any, rank: int) -> Any:
        first = {
            name: tessera.state.get_full_fp32_param(engine, p).clone() for name, p in engine.module.named_parameters()
        }
        assert all(torch.equal(first[name], p) for name, p in weights(model).items())
        run(engine, rank, 5)
        for name, param in engine.module.named_parameters():
            master = tessera.state.get_full_fp32_param(engine, param)
            assert torch.equal(master.bfloat16(), param), name
            assert not torch.equal(master, first[name]), name
        return None

    cfg = config(stage, bf16=True, zero_allow_untested_optimizer=True)
    with_client(model, 2, cfg, factory, body)


def test_client_identity_and_live_state_at_stage_0() -> None:
    model, plain = make(), make()
    client = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, optimizer, _, _ = tessera.initialize(model=model, optimizer=client, config=config(0))
    assert optimizer is client and engine.client_optimizer is client
    assert len(client.state) == 0
    run(engine, 0, 3)
    reference = train_plain(plain, lambda p: torch.optim.AdamW(p, lr=0.01), 1, 3)
    assert set(client.state) == set(model.parameters())
    for param, twin in zip(model.parameters(), plain.parameters(), strict=True):
        for key, want in reference.state[twin].items():
            got = client.state[param][key]
            assert got.shape == want.shape
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)
    client.state[model.gain]["exp_avg"].zero_()
    assert client.state[model.gain]["exp_avg"].item() == 0, "a view, not a copy"

    copied = copy.deepcopy(client.state_dict())
    assert copied["state"][0]["step"].item() == 3
    engine.destroy()
    assert client.state[model.gain]["step"].item() == 3, "states stay with the client"
    model(*batch(0)).backward()
    client.step()
    assert client.state[model.gain]["step"].item() == 4, "and it is a plain optimizer again"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["adamw", "momentum", "adagrad"])
def test_a_client_brings_its_states(stage: int, kind: str) -> None:
    """An optimizer that trained before initialize goes on where it was."""
    plain = make()
    train_plain(plain, OPTIMIZERS[kind], 1, 0)
    model = copy.deepcopy(plain)
    reference, client = OPTIMIZERS[kind](plain.parameters()), OPTIMIZERS[kind](model.parameters())
    for k in range(2):
        for m, optimizer in ((plain, reference), (model, client)):
            m(*batch(k)).backward()
            optimizer.step()
            optimizer.zero_grad()
    engine = tessera.Engine(model, config(stage), optimizer=client)
    engine(*batch(5)).backward()
    engine.step()
    plain(*batch(5)).backward()
    reference.step()
    assert_close(weights(model), weights(plain))
    engine.destroy()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["adamw", "nesterov", "rmsprop"])
def test_state_dict_round_trip(stage: int, kind: str, bf16: bool) -> None:
    """Weights and states saved on each rank continue in a new engine, bit for bit."""
    model = make()
    cfg = config(stage, bf16=bf16, zero_allow_untested_optimizer=True)
    saved: dict[int, Any] = {}

    def first(engine: tessera.Engine, client: Any, rank: int) -> Any:
        run(engine, rank, 3)
        masters = {n: tessera.state.get_full_fp32_param(engine, p).clone() for n, p in engine.module.named_parameters()}
        saved[rank] = (masters, copy.deepcopy(engine.optimizer.state_dict()))
        run(engine, rank + 5, 2)
        return weights(engine.module)

    def second(engine: tessera.Engine, client: Any, rank: int) -> Any:
        masters, state = saved[rank]
        for name, param in engine.module.named_parameters():
            tessera.state.set_full_fp32_param(engine, param, masters[name])
        engine.optimizer.load_state_dict(state)
        run(engine, rank + 5, 2)
        return weights(engine.module)

    want = with_client(model, 2, cfg, OPTIMIZERS[kind], first)
    got = with_client(model, 2, cfg, OPTIMIZERS[kind], second)
    for a, b in zip(got, want, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)


def test_sharded_states_are_this_ranks_part() -> None:
    def body(engine: tessera.Engine, rank: int) -> Any:
        run(engine, rank, 1)
        sizes = 0
        for param in engine.module.parameters():
            begin, end = tessera.state.local_range(engine, param)
            moment = engine.optimizer.state[param]["exp_avg"]
            assert moment.dim() == 1 and moment.numel() == end - begin and moment.dtype == torch.float32
            sizes += moment.numel()
        return sizes

    cfg = config(2, optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
    model = make()
    sizes = engines(model, 3, cfg, body)
    assert sum(sizes) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["adamw", "sgd", "rmsprop"])
def test_changed_learning_rates_act_at_once(stage: int, kind: str) -> None:
    model = make()
    groups = lambda m: [  # noqa: E731
        {"params": [p for n, p in m.named_parameters() if "bias" in n], "weight_decay": 0.0},
        {"params": [p for n, p in m.named_parameters() if "bias" not in n], "lr": 0.5},
    ]
    cls = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}[kind]
    plain = copy.deepcopy(model)
    reference, client = cls(groups(plain), lr=0.01), cls(groups(model), lr=0.01)
    cfg = config(stage, zero_allow_untested_optimizer=True)
    engine, optimizer, _, _ = tessera.initialize(model=model, optimizer=client, config=cfg)
    for k, rate in enumerate((0.02, 0.0, 0.3)):
        optimizer.param_groups[1]["lr"] = reference.param_groups[1]["lr"] = rate
        assert engine.get_lr() == [0.01, rate]
        engine(*batch(k)).backward()
        engine.step()
        plain(*batch(k)).backward()
        reference.step()
        reference.zero_grad()
    assert_close(weights(model), weights(plain))
    engine.destroy()


CONFIGURED = [
    (
        {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    ),
    (
        {"type": "adam", "params": {"lr": 0.01, "weight_decay": 0.1}},
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    ),
    (
        {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False, "betas": [0.8, 0.9]}},
        lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.9), weight_decay=0.1),
    ),
    (
        {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True, "amsgrad": True}},
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0, amsgrad=True),
    ),
    ({"type": "Adagrad", "params": {"lr": 0.01}}, lambda p: torch.optim.Adagrad(p, 0.01)),
    ({"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}, lambda p: torch.optim.SGD(p, 0.01, momentum=0.9)),
    ({"type": "NAdam", "params": {"lr": 0.01}}, lambda p: torch.optim.NAdam(p, 0.01)),
]


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize(("section", "factory"), CONFIGURED, ids=lambda v: v["type"] if isinstance(v, dict) else "")
def test_configured_optimizers(section: dict[str, Any], factory: Factory, stage: int) -> None:
    model, plain = make(), make()
    if "weight_decay" not in section["params"] and section["params"].get("torch_adam"):
        section = {**section, "params": {**section["params"], "weight_decay": 0}}
    train_plain(plain, factory, 1, 3)
    cfg = config(stage, optimizer=section, zero_allow_untested_optimizer=True)
    engine = tessera.initialize(model=model, config=cfg)[0]
    run(engine, 0, 3)
    assert_close(weights(model), weights(plain))
    assert engine.optimizer_name() == section["type"]
    engine.destroy()


def lion(params: list[torch.Tensor], states: list[torch.Tensor], lr: float, b1: float, b2: float, wd: float) -> None:
    for p, m in zip(params, states, strict=True):
        direction = (b1 * m + (1 - b1) * p.grad).sign()
        p.data.mul_(1 - lr * wd).sub_(lr * direction)
        m.mul_(b2).add_(p.grad, alpha=1 - b2)


@pytest.mark.parametrize("stage", STAGES)
def test_lion(stage: int) -> None:
    model, plain = make(), make()
    moments = [torch.zeros_like(p) for p in plain.parameters()]
    cfg = config(stage, optimizer={"type": "Lion", "params": {"lr": 0.01, "weight_decay": 0.1}})
    engine = tessera.initialize(model=model, config=cfg)[0]
    assert type(engine.basic_optimizer) is tessera.optim.Lion
    for k in range(3):
        engine(*batch(k)).backward()
        engine.step()
        plain.zero_grad()
        plain(*batch(k)).backward()
        lion(list(plain.parameters()), moments, 0.01, 0.9, 0.99, 0.1)
    assert_close(weights(model), weights(plain))
    assert set(engine.optimizer.state[model.gain]) == {"step", "exp_avg"}
    engine.destroy()


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_fused_adam_alone(adam_w_mode: bool) -> None:
    model, plain = make(), make()
    fused = tessera.optim.FusedAdam(model.parameters(), lr=0.01, weight_decay=0.1, adam_w_mode=adam_w_mode)
    cls = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    reference = cls(plain.parameters(), lr=0.01, weight_decay=0.1)
    for k in range(3):
        for m, optimizer in ((model, fused), (plain, reference)):
            optimizer.zero_grad()
            m(*batch(k)).backward()
            optimizer.step()
    assert_close(weights(model), weights(plain))
    with pytest.raises(RuntimeError, match="amsgrad"):
        tessera.optim.FusedAdam(model.parameters(), amsgrad=True)
    with pytest.raises(ValueError, match=r"lr.*beta"):
        tessera.optim.FusedAdam(model.parameters(), lr=-1, betas=(0.9, 1.0))


@pytest.mark.parametrize("stage", [1, 2])
def test_untested_optimizers_are_gated(stage: int) -> None:
    factory: Factory = lambda p: torch.optim.RMSprop(p)  # noqa: E731
    for optimizer in (factory(make().parameters()), factory):
        with pytest.raises(tessera.ConfigError, match="zero_allow_untested_optimizer"):
            tessera.Engine(make(), config(stage), optimizer=optimizer)
    with pytest.raises(tessera.ConfigError, match="zero_allow_untested_optimizer"):
        tessera.Engine(make(), config(stage, optimizer={"type": "RMSprop"}))
    model = make()
    with pytest.raises(NotImplementedError, match="LBFGS"):
        tessera.Engine(model, config(0), optimizer=torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("stage", STAGES)
def test_optimizer_step_is_a_complete_step(stage: int) -> None:
    """Loops that call optimizer.step() and optimizer.zero_grad() train the same."""
    model, other = make(), make()

    def body(engine: tessera.Engine, rank: int) -> Any:
        for k in range(3):
            engine(*batch(10 * rank + k)).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        assert engine.global_steps == 3
        return weights(engine.module)

    def usual(engine: tessera.Engine, rank: int) -> Any:
        run(engine, rank, 3)
        return weights(engine.module)

    for got, want in zip(engines(model, 2, config(stage), body), engines(other, 2, config(stage), usual), strict=True):
        assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("stage", STAGES)
def test_optimizer_zero_grad_drops_gradients(stage: int) -> None:
    model = make()
    engine, optimizer, _, _ = tessera.initialize(model=model, config=config(stage))
    engine(*batch(3)).backward()
    optimizer.zero_grad()
    before = weights(model)
    engine(*batch(0)).backward()
    engine.step()
    grads = plain_grads(make(), 1, lambda m, _: m(*batch(0)).backward())
    assert_close(weights(model), {n: before[n] - 0.1 * grads[n] for n in before})
    engine.destroy()


def test_wrapper_surface() -> None:
    engine, optimizer, _, _ = tessera.initialize(model=make(), config=config(1))
    assert isinstance(optimizer, torch.optim.Optimizer) and isinstance(optimizer, tessera.Optimizer)
    assert optimizer.loss_scale == 1.0 and optimizer.overflow is False and not optimizer.needs_scaler()
    assert optimizer.defaults["lr"] == 0.1 and "Parameter Group 0" in repr(optimizer)
    with pytest.raises(NotImplementedError, match="add_param_group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    run(engine, 0, 1)
    assert calls == ["pre", "post"]
    assert optimizer.step(lambda: engine(*batch(0)).backward() or 7) == 7
    assert engine.global_steps == 2
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_outside_the_model(stage: int) -> None:
    """A client's optimizer may also train a criterion's parameters."""
    model, temperature = make(), nn.Parameter(torch.tensor(2.0))
    client = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    engine = tessera.Engine(model, config(stage), optimizer=client)
    (engine(*batch(0)) * temperature).backward()
    engine.step()
    assert temperature.item() == pytest.approx(2.0 - 0.1 * make()(*batch(0)).item(), rel=1e-5)
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_an_external_optimizer_that_raises(stage: int) -> None:
    class Raises(torch.optim.RMSprop):
        fail = True

        def step(self, closure: Any = None) -> Any:
            if self.fail:
                raise OSError("boom")
            return super().step(closure)

    model = make()
    client = Raises(model.parameters())
    engine = tessera.Engine(model, config(stage, zero_allow_untested_optimizer=True), optimizer=client)
    engine(*batch(0)).backward()
    with pytest.raises(OSError, match="boom"):
        engine.step()
    client.fail = False
    engine.zero_grad()
    engine(*batch(0)).backward()
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()


def test_load_state_dict_on_the_client_keeps_exact_states() -> None:
    """torch rounds loaded states to the dtype of the parameters; an engine does not."""
    cfg = config(1, bf16=True)
    model = make()
    client = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = tessera.Engine(model, cfg, optimizer=client)
    run(engine, 0, 3)
    saved = copy.deepcopy(client.state_dict())
    run(engine, 0, 2)
    client.load_state_dict(saved)
    for number, param in enumerate(model.parameters()):
        assert torch.equal(client.state[param]["exp_avg"], saved["state"][number]["exp_avg"])
        assert client.state[param]["step"].item() == 3
    engine.destroy()


def test_net_with_a_wide_head() -> None:
    """Units above and below the size that is merged train alike."""
    cfg = config(2, tessera={"min_unit_elements": 1})
    small = engines(make(Net, 9, 3), 2, cfg, lambda e, r: (run(e, r, 2), weights(e.module))[1])[0]
    merged = engines(make(Net, 9, 3), 2, config(2), lambda e, r: (run(e, r, 2), weights(e.module))[1])[0]
    assert all(torch.equal(small[name], merged[name]) for name in small)
