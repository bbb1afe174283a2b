"""Every way to call autograd: the same code on a plain module and on an engine gives the same gradients.

A pattern takes the model (plain or engine), its module, and the rank, and leaves gradients. Pattern numbers are those
of the compatibility rules (B1 to B15 without offload).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import (
    Block,
    Net,
    applied_step,
    assert_close,
    batch,
    config,
    engines,
    full_grads,
    make,
    mse,
    one_backward,
    plain_grads,
    run_ranks,
    same_gradients,
    weights,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import tessera

Pattern = Callable[[Any, nn.Module, int], None]

STAGES = [0, 1, 2, 3]
WORLDS = [1, 2]


def loss_inside(model: Any, module: nn.Module, rank: int) -> None:
    x, y = batch(rank)
    model(x, y).backward()


def loss_outside(model: Any, module: nn.Module, rank: int) -> None:
    x, y = batch(rank)
    mse(model(x), y).backward()


def gradient_of_output(model: Any, module: nn.Module, rank: int) -> None:
    x, y = batch(rank)
    out = model(x)
    out.backward(y.to(out.dtype))


def gradient_of_outputs(model: Any, module: nn.Module, rank: int) -> None:
    x, y = batch(rank)
    first, second = model(x), model(x * 2)
    torch.autograd.backward([first, second.sum()], [y.to(first.dtype), None])


def penalty_outside_forward(model: Any, module: nn.Module, rank: int) -> None:
    x, y = batch(rank)
    with tessera.zero.GatheredParameters([module.head.weight]):
        (model(x, y) + 0.1 * module.head.weight.float().pow(2).sum()).backward()


def two_forwards_one_backward(model: Any, module: nn.Module, rank: int) -> None:
    (x, y), (x2, y2) = batch(rank), batch(rank + 10)
    (model(x, y) + model(x2, y2)).backward()


def two_forwards_two_backwards(model: Any, module: nn.Module, rank: int) -> None:
    losses = [model(*batch(rank)), model(*batch(rank + 10))]
    for loss in losses:
        loss.backward()


def three_rounds(model: Any, module: nn.Module, rank: int) -> None:
    for k in range(3):
        model(*batch(rank + 10 * k)).backward()


def retained_graph(model: Any, module: nn.Module, rank: int) -> None:
    loss = model(*batch(rank))
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def module_called_directly(model: Any, module: nn.Module, rank: int) -> None:
    module(*batch(rank)).backward()


def unused_forward(model: Any, module: nn.Module, rank: int) -> None:
    model(*batch(rank + 20))  # its graph is dropped
    with torch.no_grad():
        model(*batch(rank + 30))
    model(*batch(rank)).backward()


def inputs_restricted(model: Any, module: nn.Module, rank: int) -> None:
    model(*batch(rank)).backward(inputs=[module.head.weight, module.embed.bias])


def grad_of_outputs_first(model: Any, module: nn.Module, rank: int) -> None:
    """torch.autograd.grad leaves no trace; the backward after it counts once."""
    x, y = batch(rank)
    loss = model(x, y)
    torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
    loss.backward()


def grad_mode_off(model: Any, module: nn.Module, rank: int) -> None:
    loss = model(*batch(rank))
    with torch.no_grad():
        loss.backward()


def through_checkpoint(model: Any, module: nn.Module, rank: int, reentrant: bool) -> None:
    x, y = batch(rank)
    hidden = module.embed(x.to(module.embed.weight.dtype))
    for block in module.blocks:
        hidden = checkpoint(block, hidden, use_reentrant=reentrant)
    with tessera.zero.GatheredParameters([module.gain]):  # read outside of the forward of its module
        mse(module.head(hidden) * module.gain, y).backward()


def checkpoint_reentrant(model: Any, module: nn.Module, rank: int) -> None:
    through_checkpoint(model, module, rank, True)


def checkpoint_plain(model: Any, module: nn.Module, rank: int) -> None:
    through_checkpoint(model, module, rank, False)


def checkpoint_of_whole(model: Any, module: nn.Module, rank: int) -> None:
    x, y = batch(rank)
    x.requires_grad_(True)
    for reentrant in (True, False):
        mse(checkpoint(model, x, use_reentrant=reentrant), y).backward()


class Tiled(torch.autograd.Function):
    """Runs backward inside its forward, as losses that never hold all logits do."""

    @staticmethod
    def forward(ctx: Any, head: nn.Module, hidden: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> Any:
        with torch.enable_grad():
            piece = hidden.detach().requires_grad_(True)
            losses = []
            for part, target in zip(piece.chunk(2), y.chunk(2), strict=True):
                loss = ((head(part).float() - target) ** 2).sum() / y.numel()
                torch.autograd.backward(loss)
                losses.append(loss.detach())
        ctx.save_for_backward(piece.grad)
        return sum(losses)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (hidden_grad,) = ctx.saved_tensors
        return None, gradient * hidden_grad, None, None


class TiledNet(Net):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        assert y is not None
        return Tiled.apply(self.head, self.features(x), y, self.head.weight)


def tiled_loss(model: Any, module: nn.Module, rank: int) -> None:
    model(*batch(rank)).backward()


PATTERNS: list[Pattern] = [
    loss_inside,
    loss_outside,
    gradient_of_output,
    gradient_of_outputs,
    penalty_outside_forward,
    two_forwards_one_backward,
    two_forwards_two_backwards,
    three_rounds,
    retained_graph,
    module_called_directly,
    unused_forward,
    inputs_restricted,
    grad_of_outputs_first,
    grad_mode_off,
    checkpoint_reentrant,
    checkpoint_plain,
    checkpoint_of_whole,
]


def check(
    pattern: Pattern, model: nn.Module, stage: int, world: int, bf16: bool = False, accumulation: int = 1
) -> None:
    expected = plain_grads(model, world, lambda m, rank: pattern(m, m, rank), scale=1 / accumulation)

    def body(engine: tessera.Engine, rank: int) -> Any:
        before = weights(engine.module)
        pattern(engine, engine.module, rank)
        grads = full_grads(engine)
        left = [p.grad for p in engine.module.parameters()]
        assert stage == 0 or all(grad is None for grad in left), "p.grad is the engine's at stages 1 and 2"
        engine.step()
        for name, param in weights(engine.module).items():
            grad = grads[name]
            if grad is not None and not bf16:
                torch.testing.assert_close(param, before[name] - 0.1 * grad, rtol=1e-5, atol=1e-6)
        return grads

    for grads in engines(model, world, config(stage, accumulation, bf16), body):
        assert_close(grads, expected, bf16)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.__name__)
def test_pattern(pattern: Pattern, stage: int, world: int) -> None:
    check(pattern, make(), stage, world)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "pattern", [loss_inside, gradient_of_output, three_rounds, checkpoint_reentrant], ids=lambda p: p.__name__
)
def test_pattern_bf16(pattern: Pattern, stage: int) -> None:
    check(pattern, make(), stage, 2, bf16=True)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [3, 5])
def test_more_ranks(stage: int, world: int) -> None:
    check(loss_outside, make(Net, 3, 1), stage, world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_inner_backward_of_a_function_counts_once(stage: int, world: int) -> None:
    model = make(TiledNet)
    model.gain.requires_grad_(False)
    check(tiled_loss, model, stage, world)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


# Outputs in which no hook sees a tensor, and how it is taken out.
HIDING: dict[str, tuple[Callable[[Any, torch.Tensor], Any], Callable[[Any, Any], torch.Tensor]]] = {
    "generator": (lambda _, out: (one for one in (out,)), lambda _, hidden: next(hidden)),
    "closure": (lambda _, out: lambda: out, lambda _, hidden: hidden()),
    "object": (lambda _, out: Slotted(out), lambda _, hidden: hidden.value),
    "object of objects": (lambda _, out: SimpleNamespace(a=Slotted(out)), lambda _, hidden: hidden.a.value),
    "left": (lambda module, out: setattr(module, "left", out), lambda module, _: module.left),
}


class Hider(nn.Module):
    def __init__(self, inner: nn.Module, way: str) -> None:
        super().__init__()
        self.inner, self.way, self.factor = inner, way, nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x: torch.Tensor) -> Any:
        return HIDING[self.way][0](self, self.inner(x) * self.factor)


class Around(nn.Module):
    """A module that takes out what the one inside hides, and hides its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.hider, self.last = Hider(make(), way), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = HIDING[self.hider.way][1](self.hider, self.hider(x))
        return HIDING[self.hider.way][0](self, self.last(hidden))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", HIDING)
def test_outputs_that_hide_their_tensors(way: str, stage: int, world: int) -> None:
    def pattern(model: Any, module: nn.Module, rank: int) -> None:
        x, y = batch(rank)
        mse(HIDING[way][1](module, model(x)), y).backward()
        with torch.no_grad():
            model(x)

    check(pattern, make(Around, way), stage, world)


class TwoOutputs(Net):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        hidden = self.features(x)
        logits = self.head(hidden)
        return {"loss": logits.pow(2).mean() * self.gain, "extra": (logits, [hidden])}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_loss_over_outputs_that_derive_from_each_other(stage: int, accumulation: int) -> None:
    """1/accumulation is applied once, whichever outputs the loss uses."""

    def pattern(model: Any, module: nn.Module, rank: int) -> None:
        for k in range(accumulation):
            out = model(batch(rank + 5 * k)[0])
            (out["loss"] + out["extra"][0].mean() + out["extra"][1][0].sum()).backward()
            if isinstance(model, tessera.Engine) and k + 1 < accumulation:
                model.step()

    check(pattern, make(TwoOutputs), stage, 2, accumulation=accumulation)


@pytest.mark.parametrize("stage", STAGES)
def test_input_gradients_are_plain(stage: int) -> None:
    """No hidden factor of accumulation or world in x.grad."""
    model = make()
    expected = []
    for rank in range(2):
        x = batch(rank)[0].requires_grad_(True)
        copy.deepcopy(model)(x, batch(rank)[1]).backward()
        expected.append(x.grad)

    def body(engine: tessera.Engine, rank: int) -> torch.Tensor:
        x = batch(rank)[0].requires_grad_(True)
        engine(x, batch(rank)[1]).backward()
        return x.grad

    for got, want in zip(engines(model, 2, config(stage, accumulation=4), body), expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("stage", STAGES)
def test_engine_backward_is_loss_backward(stage: int) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        loss = engine(*batch(rank))
        returned = engine.backward(loss)
        torch.testing.assert_close(returned, loss.detach() / 2)
        engine.step()
        engine(*batch(rank + 2)).backward()  # direct and engine.backward may be mixed

    def plain(m: nn.Module, rank: int) -> None:
        m(*batch(rank)).backward()
        m(*batch(rank + 2)).backward()

    same_gradients(make(), 2, config(stage, accumulation=2), body, plain, scale=0.5)


@pytest.mark.parametrize("stage", STAGES)
def test_scale_wrt_gas_false_is_for_one_call(stage: int) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        loss = engine(*batch(rank))
        assert engine.backward(loss, scale_wrt_gas=False) == loss.detach()
        engine.step()
        engine(*batch(rank + 2)).backward()

    def plain(m: nn.Module, rank: int) -> None:
        m(*batch(rank)).backward()
        (m(*batch(rank + 2)) / 2).backward()

    same_gradients(make(), 2, config(stage, accumulation=2), body, plain)


PAIRS = [(0, 2, False, False), (1, 2, False, False), (2, 1, True, False), (0, 1, False, True), (2, 2, True, True)]


@pytest.mark.parametrize(("stage_a", "stage_b", "bf16_a", "bf16_b"), PAIRS)
def test_joint_loss_and_chain_of_two_engines(stage_a: int, stage_b: int, bf16_a: bool, bf16_b: bool) -> None:
    """One graph through two engines of different stage and dtype: each finishes its own gradients once."""
    encoder, decoder = make(nn.Linear, 5, 5, seed=1), make(Net, seed=2)

    def loss_of(a: Any, b: Any, rank: int) -> torch.Tensor:
        x, y = batch(rank)
        hidden = a(x.to(torch.bfloat16 if bf16_a and isinstance(a, tessera.Engine) else x.dtype)).float()
        return mse(b(hidden), y) + mse(b(x), y) + hidden.pow(2).mean()

    sums: list[dict[str, torch.Tensor | None]] = []
    pair = nn.ModuleList([encoder, decoder])
    sums.append(plain_grads(pair, 2, lambda m, rank: loss_of(m[0], m[1], rank).backward()))
    copies = [(copy.deepcopy(encoder), copy.deepcopy(decoder)) for _ in range(2)]
    other = tessera.thread_groups(2)

    def body(rank: int, group: tessera.Group) -> Any:
        a = tessera.Engine(copies[rank][0], config(stage_a, bf16=bf16_a), group=group)
        b = tessera.Engine(copies[rank][1], config(stage_b, bf16=bf16_b), group=other[rank])
        loss_of(a, b, rank).backward()
        grads = {f"0.{k}": v for k, v in full_grads(a).items()} | {f"1.{k}": v for k, v in full_grads(b).items()}
        a.step()
        b.step()
        assert a.was_step_applied() and b.was_step_applied()
        a.optimizer.zero_grad()
        b.optimizer.zero_grad()
        a.destroy()
        b.destroy()
        return grads

    for grads in run_ranks(2, body):
        assert_close(grads, sums[0], bf16=bf16_a or bf16_b)


@pytest.mark.parametrize("stage", STAGES)
def test_torch_func_and_autograd_grad_have_no_side_effects(stage: int) -> None:
    model = make()
    plain = copy.deepcopy(model)
    engine = tessera.Engine(model, config(stage, accumulation=4))
    x, y = batch(0)

    def value(m: Any, inputs: torch.Tensor) -> torch.Tensor:
        return m(inputs, y)

    for transform in (torch.func.grad, lambda f: torch.func.jacrev(f), lambda f: torch.func.grad_and_value(f)):
        got = transform(lambda inputs: value(engine, inputs))(x)
        want = transform(lambda inputs: value(plain, inputs))(x)
        torch.testing.assert_close(got, want)
    per_row = torch.func.vmap(torch.func.grad(lambda row: engine(row).sum()))(x)
    torch.testing.assert_close(per_row, torch.func.vmap(torch.func.grad(lambda row: plain(row).sum()))(x))

    leaf = x.clone().requires_grad_(True)
    params = list(engine.module.parameters())
    got = torch.autograd.grad(engine(leaf, y), [leaf, *params])
    want = torch.autograd.grad(plain(leaf, y), [leaf, *plain.parameters()])
    torch.testing.assert_close(got, want)
    assert all(value is None for value in full_grads(engine).values())
    assert all(param.grad is None for param in params)
    engine.destroy()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters(stage: int, world: int) -> None:
    model = make()
    for param in [*model.embed.parameters(), model.blocks[1].linear.weight, model.head.bias]:
        param.requires_grad_(False)
    check(loss_outside, model, stage, world)
    check(checkpoint_plain, model, stage, world)


class Shared(nn.Module):
    """Two names for one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse(self.second(torch.tanh(self.first(x)))[:, :3], y)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_shared_parameters_count_once(stage: int, world: int) -> None:
    check(loss_inside, make(Shared), stage, world)


class Choice(nn.Module):
    """One of two branches: ranks may differ."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(5, 3), Block(5), nn.Linear(5, 3)])

    def forward(self, x: torch.Tensor, y: torch.Tensor, branch: int) -> torch.Tensor:
        return mse(self.branches[branch](x), y)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("same", [True, False])
def test_parameters_used_on_some_ranks_only(stage: int, same: bool) -> None:
    def pattern(model: Any, module: nn.Module, rank: int) -> None:
        model(*batch(rank), 0 if same else 2 * (rank % 2)).backward()

    check(pattern, make(Choice), stage, 3)


def test_gradients_of_other_ranks_are_live_at_stage_0() -> None:
    """As with DistributedDataParallel: p.grad is the mean on every rank, also where the rank had none of its own."""
    model = make(Choice)

    def use(model: Any, rank: int) -> None:
        model(*batch(rank), 2 * (rank % 2)).backward()

    def body(engine: tessera.Engine, rank: int) -> Any:
        use(engine, rank)
        return {name: None if p.grad is None else p.grad.clone() for name, p in engine.module.named_parameters()}

    expected = plain_grads(model, 2, use)
    for grads in engines(model, 2, config(0), body):
        assert {n for n, g in grads.items() if g is None} == {n for n, g in expected.items() if g is None}
        assert_close(grads, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_toggled_requires_grad(stage: int) -> None:
    """A parameter that is frozen for one step keeps its value and its place in the next."""
    model = make()

    def train(m: Any, module: nn.Module, step: Callable[[], None]) -> None:
        for k in range(4):
            module.head.weight.requires_grad_(k % 2 == 0)
            m(*batch(k)).backward()
            step()
        module.head.weight.requires_grad_(True)

    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)

    def plain_step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    train(plain, plain, plain_step)
    engine = tessera.Engine(
        model, config(stage, optimizer={"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}})
    )
    train(engine, engine.module, engine.step)
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=name)
    engine.destroy()


class Failing(Net):
    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise OSError("boom")

    fail_in: str = ""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        if self.fail_in == "forward":
            raise OSError("boom")
        hidden = self.features(x)
        if self.fail_in == "backward":
            hidden = self.Boom.apply(hidden)
        return mse(self.head(hidden) * self.gain, y)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("call", ["direct", "engine"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_leaves_the_engine_usable(stage: int, call: str, where: str) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        engine.module.fail_in = where
        with pytest.raises(OSError, match="boom"):
            loss = engine(*batch(rank + 4))
            engine.backward(loss) if call == "engine" else loss.backward()
        engine.module.fail_in = ""
        engine.zero_grad()
        engine(*batch(rank)).backward()

    same_gradients(make(Failing), 2, config(stage), body, one_backward, applied_step)


class FailingBetween(Failing):
    """Throws between the blocks: the reduction of the last block is on its way."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(x.to(self.embed.weight.dtype)))
        return self.blocks[1](self.Boom.apply(x) if self.fail_in == "between" else x)


@pytest.mark.parametrize("unit", [0, 1 << 20])
@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_in_backward_keeps_what_had_accumulated(stage: int, unit: int) -> None:
    """As in PyTorch: gradients from before the exception stay until zero_grad()."""

    def use(m: Any, rank: int) -> None:
        module = m.module if isinstance(m, tessera.Engine) else m
        m(*batch(rank + 8)).backward()
        module.fail_in = "between"
        with pytest.raises(OSError, match="boom"):
            m(*batch(rank + 4)).backward()
        module.fail_in = ""
        m(*batch(rank)).backward()

    cfg = config(stage, tessera={"min_unit_elements": unit})
    same_gradients(make(FailingBetween), 2, cfg, use, then=applied_step)
