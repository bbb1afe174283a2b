"""fp16: scale(), the guard of unscaled backwards, overflow schedules."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Net, batch, config, engines, free_port, full_grads, make, mse, run_processes, same_bits, weights
from tessera.loss_scale import LossScaler

import tessera

STAGES = [0, 1, 2, 3]
REQUIRED = "Loss scaling is required"


def fp16(stage: int = 0, accumulation: int = 1, section: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return config(stage, accumulation, fp16={"enabled": True, "initial_scale_power": 8} | (section or {}), **more)


def poisoned(loss: torch.Tensor, here: bool) -> torch.Tensor:
    return loss * float("inf") if here else loss


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_unscaled_backward_raises_on_every_rank_and_the_engine_goes_on(stage: int, world: int) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        assert engine.optimizer.needs_scaler()
        before = weights(engine.module)
        for iteration in range(2):
            with pytest.raises(RuntimeError, match=REQUIRED):
                engine(*batch(rank)).backward()
            x, y = batch(rank)
            with pytest.raises(RuntimeError, match=REQUIRED):
                mse(engine(x), y).backward()
            out = engine(x)
            with pytest.raises(RuntimeError, match=REQUIRED):
                out.backward(torch.ones_like(out))
            with pytest.raises(RuntimeError, match=REQUIRED):
                torch.autograd.backward([engine(x), engine(x)], [torch.ones_like(out)] * 2)
            assert all(param.grad is None for param in engine.module.parameters())
            assert not engine.core.has_gradients()
            assert same_bits(weights(engine.module), before)
            engine.scale(mse(engine(x), y)).backward()
            engine.step()
            assert engine.was_step_applied() and engine.global_steps == iteration + 1
            after = weights(engine.module)
            assert not same_bits(after, before)
            before = after
        engine.module(*batch(rank)).backward()  # beside the engine: not guarded, an update of the usual size
        engine.step()
        assert engine.was_step_applied() and not same_bits(weights(engine.module), before)

    engines(make(), world, fp16(stage), body)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_part_of_the_loss_without_scale_is_refused(stage: int, world: int) -> None:
    """Whatever the order in which the parts were made; its gradients would vanish in the scaled ones."""

    def body(engine: tessera.Engine, rank: int) -> None:
        x, y = batch(rank)
        for scaled_first in (True, False):
            first, second = engine(x, y), engine(x, y)
            scaled, plain = (engine.scale(first), second) if scaled_first else (engine.scale(second), first)
            with pytest.raises(RuntimeError, match=REQUIRED):
                (scaled + plain).backward()
            assert not engine.core.has_gradients()
            scaled = engine.scale(engine(x, y))
            with pytest.raises(RuntimeError, match=REQUIRED):
                (scaled + engine(x, y)).backward()
            assert not engine.core.has_gradients()
        (engine.scale(engine(x, y)) + engine.scale(engine(x, y))).backward()
        engine.step()
        leaf = x.clone().requires_grad_()
        (engine.scale(engine(x, y)) + engine(leaf, y).detach() + leaf.sum()).backward()
        engine.step()
        assert engine.was_step_applied() and engine.global_steps == 2

    engines(make(), world, fp16(stage), body)


@pytest.mark.parametrize("stage", STAGES)
def test_a_refused_backward_leaves_no_factor(stage: int) -> None:
    """engine.backward(scale_wrt_gas=False) of a loss that cannot be scaled: the next backward is divided as ever."""

    def body(engine: tessera.Engine, rank: int) -> Any:
        x, y = batch(rank)
        if body.refused:
            mixed = engine.scale(engine(x, y)) + engine(x, y)
            with pytest.raises(ValueError, match="carry a loss scale already"):
                engine.backward(mixed, scale_wrt_gas=False)
        engine.scale(engine(x, y)).backward()
        assert engine.backward(engine(x, y)).item() > 0
        engine.step()
        return full_grads(engine)

    results = []
    for body.refused in (False, True):
        results.append(engines(make(), 2, fp16(stage, accumulation=4), body)[0])
    assert same_bits(*results)


def test_an_output_that_only_hands_inputs_through_needs_no_scale() -> None:
    class HandsThrough(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
            return super().forward(x, y), x * 2

    engine = tessera.Engine(make(HandsThrough), fp16(1))
    x, y = batch(0)
    x.requires_grad_()
    loss, same = engine(x, y)
    (engine.scale(loss) + same.sum()).backward()
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_ways_to_scale_agree(stage: int) -> None:
    x, y = batch(1)

    def gradients(way: str) -> Any:
        def body(engine: tessera.Engine, rank: int) -> Any:
            if way == "backward":
                returned = engine.backward(engine(x, y))
                with tessera.zero.GatheredParameters(engine.module.parameters()), torch.no_grad():
                    loss = engine.module(x, y)
                assert torch.equal(returned, loss), "the loss, not the scaled one"
            elif way == "scale":
                engine.scale(engine(x, y)).backward()
            elif way == "output":
                out = engine(x)
                gradient = torch.autograd.grad(mse(out, y), out, retain_graph=True)[0]
                engine.scale(out).backward(gradient)
            else:
                out = engine(x)
                torch.autograd.backward([engine.scale(mse(out, y))])
            return [tessera.state.get_full_grad(engine, p) for p in engine.module.parameters()]

        return engines(make(), 2, fp16(stage), body)[0]

    want = gradients("backward")
    for way in ("scale", "roots"):
        assert all(torch.equal(a, b) for a, b in zip(gradients(way), want, strict=True)), way
    for got, grad in zip(gradients("output"), want, strict=True):
        torch.testing.assert_close(got, grad, rtol=0.02, atol=1e-2 * float(grad.abs().max()))


def test_what_scale_refuses() -> None:
    engine = tessera.Engine(make(), fp16())
    x, y = batch(0)
    for bad in (torch.ones(1), torch.ones(3), 7, torch.ones(2, dtype=torch.long)):
        with pytest.raises(AssertionError, match="scalar tensor"):
            engine.scale(bad)
        with pytest.raises(AssertionError, match="loss must be a scalar tensor"):
            engine.backward(bad)
    scaled = engine.scale(engine(x, y))
    scaled.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=REQUIRED):
        scaled.backward()
    engine.destroy()
    plain = tessera.Engine(make(), config())
    loss = plain(x, y)
    assert plain.scale(loss) is loss and not plain.loss_scaler.needed
    loss.backward()
    plain.step()
    plain.destroy()


def test_autograd_grad_and_frozen_engines_need_no_scale() -> None:
    engine = tessera.Engine(make(), fp16())
    x, y = batch(0)
    x.requires_grad_()
    assert torch.autograd.grad(engine(x, y), x)[0].shape == x.shape
    assert torch.func.grad(lambda z: engine(z, y))(x.detach()).shape == x.shape
    # An engine that only passes gradients on (a discriminator in the generator's turn).
    engine.module.requires_grad_(False)
    engine(x, y).backward()
    assert x.grad is not None
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_overflow_schedule(stage: int) -> None:
    """On one rank only; all agree. ZeRO has a hysteresis, stage 0 none."""
    section = {"initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 2}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_min_lr": 0.02, "warmup_max_lr": 0.1}}
    steps = "x.x...x"
    expected = [16, 16, 8, 8, 8, 16, 16] if stage else [8, 8, 4, 4, 4, 8, 4]

    def body(engine: tessera.Engine, rank: int) -> None:
        skipped = 0
        for number, (step, scale) in enumerate(zip(steps, expected, strict=True)):
            bad = step == "x"
            skipped += bad
            before, done = weights(engine.module), engine.lr_scheduler.last_batch_iteration
            engine.backward(poisoned(engine(*batch(rank)), bad and rank == 1))
            engine.step()
            assert engine.was_step_applied() is not bad and engine.optimizer.overflow is bad
            assert same_bits(weights(engine.module), before) is bad
            assert engine.lr_scheduler.last_batch_iteration == done + (not bad)
            assert (engine.global_steps, engine.skipped_steps) == (number + 1, skipped)
            assert engine.optimizer.cur_scale == engine.optimizer.loss_scale == scale, number
            assert engine.optimizer.loss_scaler.cur_iter == number + 1
            assert all(param.grad is None for param in engine.module.parameters())

    engines(make(), 2, fp16(stage, section=section, scheduler=schedule), body)


@pytest.mark.parametrize("stage", STAGES)
def test_overflow_at_the_minimum(stage: int) -> None:
    section = {"initial_scale_power": 1, "hysteresis": 1}

    def body(engine: tessera.Engine, rank: int) -> None:
        for _ in range(2):
            engine.backward(poisoned(engine(*batch(rank)), True))
            if engine.optimizer.cur_scale == 1 and stage:
                with pytest.raises(RuntimeError, match="already at minimum"):
                    engine.step()
            else:
                engine.step()
            assert engine.optimizer.overflow
        assert engine.optimizer.cur_scale == 1 and engine.skipped_steps == 2
        engine.backward(engine(*batch(rank)))
        engine.step()
        assert engine.was_step_applied()

    engines(make(), 2, fp16(stage, section=section), body)


@pytest.mark.parametrize("world", [1, 2])
def test_stages_skip_the_same_steps(world: int) -> None:
    """Where they have the same hysteresis: stage 0 has none, as in DeepSpeed."""

    def body(engine: tessera.Engine, rank: int) -> list[tuple[float, bool, float]]:
        steps = []
        for step in range(20):
            loss = 300 * engine(*batch(20 * rank + step))
            engine.backward(loss)
            engine.step()
            steps.append((loss.item(), engine.was_step_applied(), engine.loss_scaler.loss_scale))
        return steps

    section = {"initial_scale_power": 16, "hysteresis": 1, "loss_scale_window": 5}
    adam = {"type": "AdamW", "params": {"lr": 0.01}}
    first, *others = (engines(make(), world, fp16(stage, 1, section, optimizer=adam), body)[0] for stage in STAGES)
    assert others == [first] * 3
    assert 2 < sum(applied for _, applied, _ in first) < 18, first


def test_gradients_stay_scaled_until_the_step() -> None:
    for stage in STAGES:

        def body(engine: tessera.Engine, rank: int, stage: int = stage) -> None:
            head = engine.module.head.weight
            engine.backward(engine(*batch(0)))
            scaled = tessera.state.get_full_grad(engine, head)
            norm = engine.grad_norm()
            engine.zero_grad()
            engine.optimizer.loss_scale = 1024
            engine.backward(engine(*batch(0)))
            torch.testing.assert_close(tessera.state.get_full_grad(engine, head), 4 * scaled, rtol=2e-3, atol=1e-2)
            engine.optimizer.loss_scale = 2  # for the next step; these gradients keep 1024
            assert engine.loss_scaler.gradient_scale == 1024
            engine.step()
            assert engine.global_grad_norm() == pytest.approx(norm, rel=2e-3)
            assert engine.loss_scaler.gradient_scale == 2

        engines(make(), 2, fp16(stage), body)


def test_gradients_that_the_user_puts_there_are_scaled_ones() -> None:
    """Stage 0: a script may fill p.grad itself and never call backward."""
    model = make()
    engine = tessera.Engine(model, fp16(optimizer={"type": "SGD", "params": {"lr": 1.0}}))
    before = weights(model)
    for param in model.parameters():
        param.grad = torch.full_like(param, 256.0)
    engine.step()
    for name, value in weights(model).items():
        torch.testing.assert_close(value.float(), before[name].float() - 1, rtol=1e-3, atol=1e-3)
    for param in model.parameters():
        param.grad = torch.full_like(param, float("inf"))
    engine.step()
    assert engine.optimizer.overflow and engine.optimizer.cur_scale == 128
    engine.destroy()


def test_surface() -> None:
    engine, optimizer, _, _ = tessera.initialize(model=make(), config=fp16(2, section={"loss_scale_window": 7}))
    assert engine.loss_scaler.dynamic
    assert optimizer.dynamic_loss_scale and optimizer.loss_scale == optimizer.cur_scale == 256
    scaler = optimizer.loss_scaler
    assert isinstance(scaler, LossScaler) and scaler.get_scale() == 256 and scaler.is_enabled()
    assert (scaler.scale_window, scaler.scale_factor, scaler.min_scale, scaler.cur_hysteresis) == (7, 2, 1, 2)
    assert optimizer.loss_scale_config.cur_iter == 0 and repr(scaler) == "LossScaler(dynamic, 256)"
    optimizer.cur_scale = 64
    assert optimizer.loss_scale == 64 and optimizer.dynamic_loss_scale
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(tessera.ConfigError):
            optimizer.loss_scale = bad
    optimizer.override_loss_scale(32)
    assert optimizer.needs_scaler() and not optimizer.dynamic_loss_scale
    for _ in range(3):
        engine.backward(poisoned(engine(*batch(0)), True))
        engine.step()
    assert optimizer.loss_scale == 32 and engine.skipped_steps == 3
    engine.destroy()

    engine = tessera.Engine(make(), config(1, bf16=True))
    assert not engine.optimizer.needs_scaler() and engine.optimizer.loss_scale == 1
    engine.optimizer.override_loss_scale(4)
    with pytest.raises(RuntimeError, match=REQUIRED):
        engine(*batch(0)).backward()
    engine.scale(engine(*batch(0))).backward()
    engine.step()
    engine.destroy()

    engine = tessera.Engine(make(), fp16(1, section={"loss_scale": 128}))
    assert not engine.loss_scaler.dynamic and engine.optimizer.loss_scale == 128
    with pytest.raises(RuntimeError, match=REQUIRED):
        engine(*batch(0)).backward()
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_a_saved_scale_goes_on(stage: int) -> None:
    section = {"loss_scale_window": 3}
    first = tessera.Engine(make(), fp16(stage, section=section))
    for step in range(5):
        first.backward(poisoned(first(*batch(0)), step == 0))
        first.step()
    state = first.optimizer.state_dict()
    scale = first.optimizer.loss_scale
    first.destroy()
    second = tessera.Engine(make(), fp16(stage, section=section))
    second.optimizer.load_state_dict(state)
    assert second.optimizer.loss_scale == scale and second.optimizer.loss_scaler.cur_iter == 5
    for _ in range(3):
        second.backward(second(*batch(0)))
        second.step()
    assert second.optimizer.loss_scale == 2 * scale, "the seventh good step"
    second.destroy()


def test_bf16_check_grad_overflow() -> None:
    for stage in STAGES:
        for check in (True, False):

            def body(engine: tessera.Engine, rank: int, check: bool = check) -> None:
                engine.backward(poisoned(engine(*batch(rank)), rank == 0))
                engine.step()
                assert engine.was_step_applied() is not check
                assert engine.skipped_steps == int(check)

            section = {"enabled": True, "check_grad_overflow": check}
            engines(make(), 2, config(stage) | {"bf16": section}, body)


@pytest.mark.parametrize("other", ["bf16", "fp32", "fp16"])
def test_a_joint_loss_of_two_modes(other: str) -> None:
    """first.scale(loss) is enough where only the first has a scale; both keep the sizes of their gradients."""
    cfg = {"bf16": config(1, bf16=True), "fp32": config(1), "fp16": fp16(1, section={"initial_scale_power": 4})}[other]
    first, second = tessera.Engine(make(), fp16(2)), tessera.Engine(make(seed=1), cfg)
    x, y = batch(0)
    alone = []
    for engine in (first, second):
        engine.backward(engine(x, y))
        alone.append(engine.grad_norm())
        engine.zero_grad()
    loss = first(x, y) + second(x, y)
    if other == "fp16":
        with pytest.raises(RuntimeError, match=REQUIRED):
            first.scale(loss).backward()
        first.zero_grad()
        second.zero_grad()
        loss = second.scale(first(x, y) + second(x, y))
    first.scale(loss).backward()
    for engine, norm in zip((first, second), alone, strict=True):
        assert engine.grad_norm() == pytest.approx(norm, rel=5e-3)
        engine.step()
        assert engine.was_step_applied()
        engine.destroy()


def worker(rank: int, world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    for stage in STAGES:
        engine = tessera.initialize(model=make(), config=fp16(stage, section={"hysteresis": 1}))[0]
        with pytest.raises(RuntimeError, match=REQUIRED):
            engine(*batch(rank)).backward()
        for step in range(3):
            engine.scale(poisoned(engine(*batch(rank)), step == 1 and rank == 1)).backward()
            engine.step()
            assert engine.was_step_applied() is (step != 1)
        assert engine.optimizer.loss_scale == 128
        with pytest.raises(RuntimeError, match=REQUIRED):
            engine(*batch(rank)).backward()
        torch.save(weights(engine.module), os.path.join(folder, f"{stage}-{rank}.pt"))
        engine.destroy()
    torch.distributed.destroy_process_group()


def test_processes(tmp_path: Path) -> None:
    run_processes(2, worker, 2, free_port(), str(tmp_path))
    first = torch.load(tmp_path / "0-0.pt")
    for stage in STAGES:
        for rank in range(2):
            assert same_bits(torch.load(tmp_path / f"{stage}-{rank}.pt"), first)
