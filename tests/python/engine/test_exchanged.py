"""What a user exchanges or puts by hand between steps means what it means in plain PyTorch: values of parameters
(`p.data`), gradients (`p.grad`), states of the optimizer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import config, engines, same_bits
from torch import nn

import tessera

WIDTH = 200  # gradients that lie alone, on one rank


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.a.weight.dtype)
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))).float().square().mean()


def three(seed: int = 0) -> Three:
    torch.manual_seed(seed)
    return Three()


def inputs(step: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step))


def swap(model: Any) -> None:
    model.a.weight.data, model.b.weight.data = model.b.weight.data, model.a.weight.data


def rotate(model: Any) -> None:
    a, b, c = (m.weight for m in (model.a, model.b, model.c))
    a.data, b.data, c.data = b.data, c.data, a.data


def transpose(model: Any) -> None:
    model.a.weight.data = model.a.weight.data.t()


def part(model: Any) -> None:
    model.a.bias.data = model.b.weight.data[0]


VALUES: dict[str, Callable[[Any], None]] = {f.__name__: f for f in (swap, rotate, transpose, part)}
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
}
TOLERANCE = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 3e-3}


def settings(stage: int, mode: str = "fp32", optimizer: dict[str, Any] = SGD) -> dict[str, Any]:
    cfg = config(stage, optimizer=copy.deepcopy(optimizer), **MODES[mode])
    cfg["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return cfg


def plain(acts: Callable[[Three, int], None], optimizer: Any = None) -> dict[str, torch.Tensor]:
    """Three steps, with acts(model, step) between a backward and its update (even) and after that (odd)."""
    model = three()
    update = optimizer(model.parameters()) if optimizer else torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(3):
        model(inputs(step)).backward()
        acts(model, 2 * step)
        update.step()
        update.zero_grad()
        acts(model, 2 * step + 1)
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    with tessera.zero.GatheredParameters(list(model.parameters())):
        return {name: param.detach().float().clone() for name, param in model.named_parameters()}


def train(engine: Any, acts: Callable[[Any, int], None]) -> dict[str, torch.Tensor]:
    for step in range(3):
        engine.backward(engine(inputs(step)))
        acts(engine, 2 * step)
        engine.step()
        acts(engine, 2 * step + 1)
    return weights(engine.module)


def close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    for name, value in want.items():
        torch.testing.assert_close(got[name], value.float(), rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", VALUES)
def test_values_that_parameters_exchange(what: str, mode: str, stage: int, ranks: int) -> None:
    def acts(model: Any, moment: int) -> None:
        if moment == 1:
            VALUES[what](model)
            for param in model.parameters():
                param.data = param.data.clone()

    def on_engine(engine: Any, moment: int) -> None:
        if moment != 1:
            return
        if stage == 3 and ranks == 2:
            with tessera.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
                VALUES[what](engine.module)
        else:
            VALUES[what](engine.module)

    want = plain(acts)
    for got in engines(three(), ranks, settings(stage, mode), lambda engine, rank: train(engine, on_engine)):
        close(got, want, TOLERANCE[mode])


def exchange(model: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.data, theirs.data = theirs.data, mine.data


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("mode", MODES)
def test_an_average_of_the_weights_that_takes_their_place_for_an_evaluation(mode: str, stage: int) -> None:
    def body(engine: Any, rank: int) -> None:
        model = engine.module
        average = copy.deepcopy(model)
        for param in average.parameters():
            param.data.mul_(0.5)
        engine.backward(engine(inputs(0)))
        engine.step()
        trained, averaged = weights(model), {name: p.detach().clone() for name, p in average.named_parameters()}
        with torch.no_grad():
            expected = average(inputs(9))
            exchange(model, average)
            assert torch.equal(engine(inputs(9)), expected)
            assert same_bits({name: p.detach().float() for name, p in average.named_parameters()}, trained)
            exchange(model, average)
            engine(inputs(9))
        assert same_bits(weights(model), trained)
        assert same_bits({name: p.detach() for name, p in average.named_parameters()}, averaged)
        engine.backward(engine(inputs(1)))
        engine.step()
        assert not same_bits(weights(model), trained)
        assert same_bits({name: p.detach() for name, p in average.named_parameters()}, averaged)

    engines(three(), 1, settings(stage, mode), body)


@pytest.mark.parametrize("stage", range(4))
def test_two_engines_that_exchange_their_values(stage: int) -> None:
    def both(first: Any, second: Any, models: tuple[nn.Module, nn.Module], steps: tuple[Any, Any]) -> None:
        for step in range(3):
            for call, update in zip((first, second), steps, strict=True):
                call(inputs(step)).backward()
                update()
            if step == 0:
                exchange(*models)

    left, right = three(), three(1)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (left, right)]

    def update(number: int) -> Callable[[], Any]:
        return lambda: (optimizers[number].step(), optimizers[number].zero_grad())

    both(left, right, (left, right), (update(0), update(1)))
    made = [tessera.Engine(three(seed), settings(stage), group=tessera.thread_groups(1)[0]) for seed in range(2)]
    both(*made, (made[0].module, made[1].module), (made[0].step, made[1].step))
    for engine, want in zip(made, (left, right), strict=True):
        close(weights(engine.module), dict(want.named_parameters()))
        engine.destroy()


GRADIENTS: dict[str, Callable[[Any], None]] = {
    "exchanged": lambda m: exchange_grads(m),
    "transposed": lambda m: setattr(m.b.weight, "grad", m.b.weight.grad.t()),
    "a row of another": lambda m: setattr(m.a.bias, "grad", m.b.weight.grad[0]),
    "taken from another": lambda m: setattr(m.a.weight, "grad", m.b.weight.grad),
}


def exchange_grads(model: Any) -> None:
    model.a.weight.grad, model.b.weight.grad = model.b.weight.grad, model.a.weight.grad


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("what", GRADIENTS)
def test_gradients_that_parameters_exchange(what: str, ranks: int, again: bool) -> None:
    """Stage 0, also where another backward adds to them."""

    def acts(model: Any, moment: int) -> None:
        if moment % 2 == 0:
            GRADIENTS[what](model)
        if moment % 2 == 0 and again:
            for param in model.parameters():
                param.grad = param.grad.clone()  # a.grad = b.grad would share what adds up

    def on_engine(engine: Any, moment: int) -> None:
        if moment % 2 == 0:
            GRADIENTS[what](engine.module)
        if moment % 2 == 0 and again:
            engine.backward(engine(inputs(20 + moment)))

    def on_plain(model: Any, moment: int) -> None:
        acts(model, moment)
        if moment % 2 == 0 and again:
            model(inputs(20 + moment)).backward()

    cfg = settings(0)
    for got in engines(three(), ranks, cfg, lambda engine, rank: train(engine, on_engine)):
        close(got, plain(on_plain))


AMID: dict[str, Callable[[Any], Any]] = {
    "engine.zero_grad": lambda e: e.zero_grad(),
    "optimizer.zero_grad": lambda e: e.optimizer.zero_grad(),
    "module.zero_grad": lambda e: e.module.zero_grad(),
    "one dropped": lambda e: e.module.a.zero_grad(),
    "one replaced": lambda e: setattr(e.module.a.weight, "grad", e.module.a.weight.grad * 2),
    "two exchanged": lambda e: exchange_grads(e.module),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("what", AMID)
def test_what_is_dropped_or_put_amid_an_accumulation_is_seen_before_the_next_backward(
    what: str, ranks: int, tmp_path: Path
) -> None:
    """Stage 0: by who reads gradients, saves them, or counts their memory."""

    def end_of_step(engine: Any) -> dict[str, torch.Tensor]:
        loss = engine(inputs(1))
        if what.endswith("zero_grad"):
            assert engine.core.memory().grads == 0
        engine.backward(loss)
        engine.step()
        return weights(engine.module)

    def body(engine: Any, rank: int) -> None:
        engine.backward(engine(inputs(0)))
        engine.step()
        AMID[what](engine)
        for name, param in engine.module.named_parameters():
            grad = None if param.grad is None else param.grad.clone()
            seen = tessera.state.get_full_grad(engine, param)
            assert seen is None if grad is None else torch.equal(seen, grad), name
        engine.save_checkpoint(str(tmp_path), tag="amid")
        want = end_of_step(engine)
        engine.load_checkpoint(str(tmp_path), tag="amid")
        assert same_bits(end_of_step(engine), want)

    engines(three(), ranks, settings(0) | {"gradient_accumulation_steps": 2}, body)


def by_hand(call: Any, params: list[torch.Tensor], step: int) -> None:
    for param, grad in zip(params, torch.autograd.grad(call(inputs(step)), params), strict=True):
        param.grad = grad


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", ["alone", "over a backward", "before a backward", "of one"])
def test_gradients_put_by_hand(kind: str, stage: int, ranks: int) -> None:
    """After torch.autograd.grad, over what a backward left, and with a backward that adds to them."""

    def run(call: Any, model: nn.Module, backward: Any, update: Callable[[], Any]) -> None:
        params = list(model.parameters())
        for step in range(3):
            if kind in ("over a backward", "of one"):
                backward(call(inputs(10 + step)))
            if kind == "of one":
                model.b.weight.grad = torch.full((WIDTH, WIDTH), 1e-3)
            else:
                by_hand(call, params, step)
            if kind == "before a backward":
                backward(call(inputs(10 + step)))
            update()

    want = three()
    optimizer = torch.optim.SGD(want.parameters(), 0.05, momentum=0.9)
    run(want, want, lambda loss: loss.backward(), lambda: (optimizer.step(), optimizer.zero_grad()))

    def body(engine: Any, rank: int) -> dict[str, torch.Tensor]:
        run(engine, engine.module, engine.backward, engine.step)
        assert all(p.grad is None for p in engine.module.parameters()) and engine.global_steps == 3
        return weights(engine.module)

    for got in engines(three(), ranks, settings(stage), body):
        close(got, {name: p.detach() for name, p in want.named_parameters()})


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_zeros_that_fill_in_what_seems_to_be_missing_replace_nothing(stage: int, ranks: int) -> None:
    """p.grad is None after a backward of stages 1 to 3."""

    def fill_in(engine: Any, moment: int) -> None:
        for param in engine.module.parameters() if moment % 2 == 0 else ():
            if param.grad is None:
                param.grad = torch.zeros_like(param)

    for got in engines(three(), ranks, settings(stage), lambda engine, rank: train(engine, fill_in)):
        close(got, plain(lambda model, moment: None))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_gradients_put_by_hand_are_read_and_saved(stage: int, ranks: int, tmp_path: Path) -> None:
    """Amid an accumulation; and a step() with nothing but them trains, which no warning denies."""
    cfg = settings(stage) | {"gradient_accumulation_steps": 2}
    given = torch.full((WIDTH, WIDTH), 0.1)

    def end_of_step(engine: Any) -> dict[str, torch.Tensor]:
        engine.backward(engine(inputs(1)))
        engine.step()
        return weights(engine.module)

    def body(engine: Any, rank: int) -> None:
        weight = engine.module.b.weight
        engine.backward(engine(inputs(0)))
        engine.step()
        weight.grad = given.clone()
        torch.testing.assert_close(tessera.state.get_full_grad(engine, weight), given)
        engine.save_checkpoint(str(tmp_path), tag="amid")
        want = end_of_step(engine)
        engine.load_checkpoint(str(tmp_path), tag="amid")
        assert same_bits(end_of_step(engine), want)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(2):
                by_hand(engine, list(engine.module.parameters()), step)
                engine.step()

    engines(three(), ranks, cfg, body)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("differ", ["values", "one has none"])
def test_ranks_that_put_other_gradients_are_an_error_on_all(differ: str, stage: int) -> None:
    def body(engine: Any, rank: int) -> None:
        weight = engine.module.b.weight
        before = weights(engine.module)
        engine.backward(engine(inputs(0)))
        if differ == "values" or rank == 0:
            weight.grad = torch.full((WIDTH, WIDTH), float(rank + 1))
        with pytest.raises((ValueError, RuntimeError), match=r"'b\.weight' put into p\.grad by hand.*set_full_grad"):
            engine.step()
        assert engine.global_steps == 0 and same_bits(weights(engine.module), before)
        weight.grad = torch.full((WIDTH, WIDTH), 0.5)
        engine.step()
        torch.testing.assert_close(weights(engine.module)["b.weight"], before["b.weight"] - 0.05 * 0.5)

    engines(three(), 2, settings(stage), body)


def test_a_gradient_by_hand_beside_an_update_in_the_backward_is_refused() -> None:
    cfg = settings(2)
    cfg["tessera"] = {"update_in_backward": True}

    def body(engine: Any, rank: int) -> None:
        engine.backward(engine(inputs(0)))
        if rank == 0:
            engine.module.b.weight.grad = torch.zeros(WIDTH, WIDTH)
        with pytest.raises((ValueError, RuntimeError), match=r"'b\.weight'.*update_in_backward"):
            engine.step()
        engine.module.b.weight.grad = None
        engine.step()

    engines(three(), 2, cfg, body)


def swap_states(optimizer: Any, first: torch.Tensor, second: torch.Tensor) -> None:
    state = optimizer.state
    state[first], state[second] = state[second], state[first]


def swap_moments(optimizer: Any, first: torch.Tensor, second: torch.Tensor) -> None:
    state = optimizer.state
    for key in ("exp_avg", "exp_avg_sq"):
        state[first][key], state[second][key] = state[second][key], state[first][key]


def turn_moments(optimizer: Any, first: torch.Tensor, second: torch.Tensor) -> None:
    for key in ("exp_avg", "exp_avg_sq"):
        values = optimizer.state[first][key]
        optimizer.state[first].update({key: values.flip(0) if values.dim() == 1 else values.t()})
        assert not torch.equal(optimizer.state[first][key], values)


def reset(optimizer: Any, first: torch.Tensor, second: torch.Tensor) -> None:
    kept = optimizer.state[first]["exp_avg"]
    known = kept.clone()
    optimizer.state[first] = {}
    assert torch.equal(kept, known)


STATES: dict[str, Callable[..., None]] = {f.__name__: f for f in (swap_states, swap_moments, turn_moments, reset)}


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("what", STATES)
def test_states_that_parameters_exchange(what: str, stage: int) -> None:
    if what == "turn_moments" and stage > 0:
        pytest.skip("states are 1-D parts there")
    made: list[torch.optim.Optimizer] = []

    def adamw(params: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.AdamW(params, lr=0.01))
        return made[-1]

    def acts(model: Any, moment: int) -> None:
        if moment == 3:
            STATES[what](made[0], model.a.weight, model.b.weight)

    def on_engine(engine: Any, moment: int) -> None:
        if moment == 3:
            STATES[what](engine.optimizer, engine.module.a.weight, engine.module.b.weight)

    want = plain(acts, adamw)
    cfg = settings(stage, optimizer={"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}})
    for got in engines(three(), 1, cfg, lambda engine, rank: train(engine, on_engine)):
        close(got, want, 1e-4)


CLAMPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "no_grad": lambda w: w.detach().clamp_(-2, 2),
    "data": lambda w: w.data.clamp_(-2, 2),
    "one element": lambda w: w.detach()[0, 0].fill_(1.0),
    "replaced": lambda w: setattr(w, "data", w.data.clamp(-2, 2)),
    "region": lambda w: in_region(w),
    "nothing": lambda w: None,
}


def in_region(weight: torch.Tensor) -> None:
    with tessera.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight[0, 0] = 1.0


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_states_are_written_or_refused_in_every_way_of_a_dict(stage: int) -> None:
    cfg = settings(stage, optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
    engine = tessera.Engine(three(), cfg, group=tessera.single_group())
    train(engine, lambda engine, moment: None)
    param = engine.module.a.weight
    state = engine.optimizer.state[param]
    state |= {"exp_avg": torch.full_like(state["exp_avg"], 0.5)}
    assert (engine.optimizer.state[param]["exp_avg"] == 0.5).all()
    assert state.setdefault("exp_avg", 3) is not None and state.pop("none", 7) == 7
    for change in (lambda: state.pop("exp_avg"), lambda: state.__delitem__("exp_avg"), state.popitem):
        with pytest.raises(tessera.UsageError, match="all states of a parameter or none"):
            change()
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("mode", ["bf16", "bf16 16", "fp16"])
@pytest.mark.parametrize("clamp", CLAMPS)
def test_a_write_keeps_the_masters_of_what_it_leaves_alone(clamp: str, mode: str, stage: int) -> None:
    """Updates below half a unit in the last place of the weights add up in their masters."""
    ranks = 1 if stage == 3 and clamp != "region" else 2
    cfg = settings(stage, mode[:4], {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.0}})
    if mode == "bf16 16":
        cfg["tessera"] = {"state_bytes": 16}
    model = nn.Linear(6, 6)
    model.weight.data.fill_(1.0)

    def body(engine: Any, rank: int) -> torch.Tensor:
        weight = engine.module.weight
        for step in range(12):
            x = torch.randn(2, 6, generator=torch.Generator().manual_seed(step))
            engine.backward(engine(x.to(weight.dtype)).float().square().mean())
            engine.step()
            CLAMPS[clamp](weight)
        return tessera.state.get_full_fp32_param(engine, weight).clone()

    for master in engines(model, ranks, cfg, body):
        assert (master - 1).flatten()[1:].abs().mean() > 3e-4


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
@pytest.mark.parametrize("how", ["load_checkpoint", "set_full_fp32_param"])
def test_a_write_keeps_masters_that_came_from_elsewhere(how: str, mode: str, tmp_path: Path) -> None:
    """What weights were known to be before them says nothing any more."""
    cfg = settings(1, mode, {"type": "AdamW", "params": {"lr": 1e-3}})

    def body(engine: Any, rank: int) -> None:
        weight = engine.module.a.weight

        def train(step: int) -> torch.Tensor:
            engine.backward(engine(inputs(step)))
            engine.step()
            with torch.no_grad():
                weight[0, 0] = float(step)
            return tessera.state.get_full_fp32_param(engine, weight).clone()

        train(0)
        want = train(1)
        engine.save_checkpoint(str(tmp_path))
        for step in range(2, 5):
            train(step)
        if how == "load_checkpoint":
            engine.load_checkpoint(str(tmp_path))
        else:
            tessera.state.set_full_fp32_param(engine, weight, want)
        with torch.no_grad():
            weight[0, 0] = 1.0  # as it is
        assert torch.equal(tessera.state.get_full_fp32_param(engine, weight), want)

    engines(three(), 2, cfg, body)


@pytest.mark.parametrize("steps", [4, 110])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_resume_beside_writes_goes_on_bit_for_bit(stage: int, steps: int, tmp_path: Path) -> None:
    """In another engine, too. After many updates without a write all begins anew."""
    cfg = settings(stage, "bf16", {"type": "AdamW", "params": {"lr": 1e-3}})

    def train(engine: Any, begin: int, end: int) -> dict[str, torch.Tensor]:
        for step in range(begin, end):
            engine.backward(engine(inputs(step)))
            engine.step()
            if step < 4 or step >= steps:
                for param in engine.module.parameters():
                    with torch.no_grad():
                        param.clamp_(-0.05, 0.05)
        return {n: tessera.state.get_full_fp32_param(engine, p).clone() for n, p in engine.module.named_parameters()}

    first, second = (tessera.Engine(three(seed), cfg, group=tessera.single_group()) for seed in (0, 1))
    train(first, 0, steps)
    first.save_checkpoint(str(tmp_path))
    want = train(first, steps, steps + 3)
    for engine in (second, first):
        engine.load_checkpoint(str(tmp_path))
        assert same_bits(train(engine, steps, steps + 3), want)
        engine.destroy()


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("write", ["no_grad", "data"])
def test_weights_that_are_pruned_are_zero(write: str, mode: str) -> None:
    """Whatever was left over of them beside a split master."""
    cfg = settings(1, mode, {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.0}})

    def body(engine: Any, rank: int) -> None:
        weight = engine.module.a.weight
        mask = torch.arange(WIDTH) % 2
        engine.backward(engine(inputs(0)))
        engine.step()
        (weight.detach() if write == "no_grad" else weight.data).mul_(mask)
        master = tessera.state.get_full_fp32_param(engine, weight)
        assert master[:, mask == 0].abs().max() < 1e-37 and master.isfinite().all()
        engine.backward(engine(inputs(1)))
        engine.step()
        assert weight.isfinite().all() and weight[:, mask == 0].abs().max() < 1e-3

    engines(three(), 2, cfg, body)
