"""The states of optimizers: who keeps them, how they are seen, saved and loaded; clients that run themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import (
    OPTIMIZERS,
    Factory,
    assert_close,
    batch,
    config,
    engines,
    losses_of,
    make,
    masters,
    run,
    same_bits,
    train_plain,
    weights,
)
from torch import nn

import tessera

STAGES = [0, 1, 2]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["adamw", "momentum", "rmsprop"])
def test_bf16_masters(kind: str, stage: int) -> None:
    """The masters start from the cast weights and are updated in fp32: small steps that bf16 cannot hold add up."""
    model = make()
    factory: Factory = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-5, weight_decay=0.0),
        "momentum": lambda p: torch.optim.SGD(p, lr=1e-5, momentum=0.9),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-5),
    }[kind]

    def body(engine: tessera.Engine, rank: int) -> None:
        first = masters(engine)
        assert all(torch.equal(first[name], p.bfloat16().float()) for name, p in weights(model).items())
        run(engine, rank, 5)
        for name, master in masters(engine).items():
            assert torch.equal(master.bfloat16(), engine.module.get_parameter(name)), name
            assert not torch.equal(master, first[name]), name

    cfg = config(stage, bf16=True, zero_allow_untested_optimizer=True)
    engines(model, 2, cfg, body, client=factory)


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
def test_parameters_outside_the_model(stage: int) -> None:
    """A client's optimizer may also train a criterion's parameters."""
    model, temperature = make(), nn.Parameter(torch.tensor(2.0))
    client = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    engine = tessera.Engine(model, config(stage), optimizer=client)
    (engine(*batch(0)) * temperature).backward()
    engine.step()
    assert temperature.item() == pytest.approx(2.0 - 0.1 * make()(*batch(0)).item(), rel=1e-5)
    engine.destroy()


class Raises(torch.optim.RMSprop):
    fail = True

    def step(self, closure: Any = None) -> Any:
        if self.fail:
            raise OSError("boom")
        return super().step(closure)


@pytest.mark.parametrize("autocast", ["", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_raised_may_be_tried_again(stage: int, autocast: str) -> None:
    """Gradients are unscaled and clipped once, also those that come between the two tries."""
    cfg = config(stage, zero_allow_untested_optimizer=True, gradient_clipping=0.01)
    if autocast:
        cfg["torch_autocast"] = {"enabled": True, "dtype": autocast}

    def train(tries: int) -> dict[str, torch.Tensor | None]:
        model = make()
        client = Raises(model.parameters(), lr=0.01)
        engine = tessera.Engine(model, cfg, optimizer=client)
        client.fail = tries > 1
        engine.backward(engine(*batch(0)) * 0.1)
        if client.fail:
            with pytest.raises(OSError, match="boom"):
                engine.step()
        engine.backward(engine(*batch(1)) * 0.1)
        norm = engine.core.grad_norm()
        client.fail = False
        engine.step()
        assert engine.was_step_applied()
        assert engine.global_grad_norm() == pytest.approx(norm, rel=1e-6)
        result = weights(engine.module)
        if tries > 1:  # what was there may be dropped, too
            client.fail = True
            engine.backward(engine(*batch(0)))
            with pytest.raises(OSError, match="boom"):
                engine.step()
            client.fail = False
            engine.zero_grad()
            engine.backward(engine(*batch(0)))
            engine.step()
            assert engine.was_step_applied()
        engine.destroy()
        return result

    assert_close(train(2), train(1))


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


# Without torch's "step" in its states, balanced SGD would draw other roundings.
KINDS = [(kind, mode) for kind in ("adamw", "nesterov", "rmsprop") for mode in ("fp32", "bf16", "balanced", "fp16")]
KINDS.remove(("nesterov", "balanced"))


@pytest.mark.parametrize(("kind", "mode"), KINDS)
@pytest.mark.parametrize("stage", STAGES)
def test_weights_and_states_are_all_of_a_run(stage: int, kind: str, mode: str) -> None:
    """What the module holds in 16 bits comes back exact: state_dict() has the masters."""
    sections: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"bf16": True},
        "balanced": {"bf16": True, "tessera": {"state_bytes": 10}},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6}},
    }
    cfg = config(stage, zero_allow_untested_optimizer=True, **sections[mode])
    saved: dict[int, Any] = {}

    def first(engine: tessera.Engine, rank: int) -> Any:
        losses_of(engine, rank, 0, 3)
        saved[rank] = copy.deepcopy((engine.module_state_dict(), engine.optimizer.state_dict()))
        losses_of(engine, rank, 3, 2)
        return masters(engine)

    def second(engine: tessera.Engine, rank: int) -> Any:
        module, optimizer = saved[rank]
        engine.load_module_state_dict(module)
        engine.optimizer.load_state_dict(optimizer)
        losses_of(engine, rank, 3, 2)
        return masters(engine)

    want = engines(make(), 2, cfg, first, client=OPTIMIZERS[kind])
    got = engines(make(seed=9), 2, cfg, second, client=OPTIMIZERS[kind])
    for a, b in zip(got, want, strict=True):
        assert same_bits(a, b)


def test_masters_of_another_model_are_refused() -> None:
    engine = tessera.Engine(make(), config(1, bf16=True))
    state = engine.optimizer.state_dict()
    state["masters"]["other"] = state["masters"].pop("gain")
    with pytest.raises(ValueError, match="gain, other"):
        engine.optimizer.load_state_dict(state)
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["adamw", "momentum", "rmsprop"])
def test_a_client_takes_its_states_along(stage: int, kind: str) -> None:
    """One rank holds all of every state: the optimizer goes on without the engine, and in the next one."""
    plain = make()
    reference = train_plain(plain, OPTIMIZERS[kind], 1, 2)
    model = make()
    client = OPTIMIZERS[kind](model.parameters())
    cfg = config(stage, zero_allow_untested_optimizer=True)
    for k in range(4):
        engine = tessera.Engine(model, cfg, optimizer=client) if k in (0, 3) else None
        if k in (0, 3):
            run(engine, k, 2 if k == 0 else 1)
            engine.destroy()
        elif k == 2:
            model(*batch(7)).backward()
            client.step()
            client.zero_grad()
    for seed in (7, 30):
        plain(*batch(seed)).backward()
        reference.step()
        reference.zero_grad()
    assert_close(weights(model), weights(plain))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["sgd", "rmsprop"])
def test_parameters_are_not_removed(stage: int, kind: str) -> None:
    """One that nobody would update is an error; freezing does that."""
    model = make()
    client = OPTIMIZERS[kind](model.parameters())
    engine = tessera.Engine(model, config(stage, zero_allow_untested_optimizer=True), optimizer=client)
    run(engine, 0, 1)
    client.param_groups[0]["params"].pop()
    before = weights(model)
    engine(*batch(0)).backward()
    with pytest.raises(RuntimeError, match=r"initialize again"):
        engine.step()
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    engine.destroy()
    owned = [param for group in client.param_groups for param in group["params"]]
    known = {id(param) for param in model.parameters()}
    assert sum(id(param) in known for param in owned) == len(known) - 1
