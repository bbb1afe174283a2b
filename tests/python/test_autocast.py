"""torch_autocast: against plain autocast loops, what travels, regions of the caller, and the helper functions."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import Net, batch, config, engines, make, masters, mse, run_ranks, weights
from torch import nn
from torch.utils.checkpoint import checkpoint

import tessera
from tessera import autocast

STAGES = [0, 1, 2, 3]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ADAM = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
DEFAULT = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def cast_config(stage: int = 0, dtype: str = "bf16", accumulation: int = 1, **more: Any) -> dict[str, Any]:
    section = {"enabled": True, "dtype": dtype} | more.pop("section", {})
    return config(stage, accumulation, torch_autocast=section, **({"optimizer": ADAM} | more))


def products(monkey: nn.Module) -> list[torch.dtype]:
    """Fills with the dtypes that the module's Linear layers return."""
    seen: list[torch.dtype] = []
    for module in monkey.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    return seen


def plain_loop(
    model: nn.Module,
    world: int,
    steps: int,
    dtype: torch.dtype,
    accumulation: int = 1,
    classes: tuple[type[nn.Module], ...] = DEFAULT,
    others: torch.dtype = FP32,
    clip: float = 0.0,
    each_backward: bool = False,
    run: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor] = lambda m, x, y: m(x, y),
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A loop as people write it; with several ranks, gradients of `classes` travel in `dtype`, the rest in `others`,
    their sums over micro-batches or those of each backward. Rank 0's losses and the weights."""
    marked = {id(p) for m in model.modules() if type(m) in classes for p in m.parameters(recurse=False)}
    # Outside of engines it has the arithmetic of the kernels.
    optimizer = tessera.optim.FusedAdam(model.parameters(), lr=0.01, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is FP16)
    losses = []

    def sent(param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        return value if world == 1 else value.to(dtype if id(param) in marked else others).float()

    for step in range(steps):
        local: list[dict[int, torch.Tensor]] = [{} for _ in range(world)]
        totals = {id(p): torch.zeros_like(p) for p in model.parameters()}
        for micro in range(accumulation):
            for rank in range(world):
                with torch.autocast("cpu", dtype=dtype):
                    loss = run(model, *batch(10 * rank + step * accumulation + micro))
                if rank == 0:
                    losses.append(loss.item())
                scaler.scale(loss).backward()
                for param in model.parameters():
                    before = 0 if each_backward else local[rank].get(id(param), 0)
                    local[rank][id(param)] = before + param.grad / accumulation
                model.zero_grad()
            if each_backward or micro == accumulation - 1:
                for param in model.parameters():
                    mean = sum(sent(param, grads[id(param)]) for grads in local) / world
                    totals[id(param)] += sent(param, mean)
        for param in model.parameters():
            param.grad = totals[id(param)]
        scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def train(engine: tessera.Engine, rank: int, steps: int, accumulation: int = 1) -> tuple[list[float], dict[str, Any]]:
    losses = []
    for micro in range(steps * accumulation):
        loss = engine(*batch(10 * rank + micro))
        losses.append(loss.item())
        if micro % 2:
            engine.backward(loss)
        else:
            engine.scale(loss).backward()
        engine.step()
    return losses, masters(engine)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_parity_with_a_plain_loop(stage: int, dtype: str, world: int, accumulation: int) -> None:
    """Bit for bit. Stages 2 and 3 reduce after every backward."""
    model = make(width=33)
    losses, want = plain_loop(
        copy.deepcopy(model), world, 4, FP16 if dtype == "fp16" else BF16, accumulation, each_backward=stage >= 2
    )
    results = engines(
        model, world, cast_config(stage, dtype, accumulation), lambda engine, rank: train(engine, rank, 4, accumulation)
    )
    assert results[0][0] == losses
    for _, got in results:
        for name, value in want.items():
            assert got[name].equal(value), name


def test_stages_agree_bit_for_bit() -> None:
    """Stage 3 gathers rounded weights, and autocast rounds exact ones: the same values to every Linear."""
    model = make(width=33)
    results = [
        engines(model, 2, cast_config(stage, section={"lower_precision_safe_modules": modules}), train_six)[0]
        for modules in (["torch.nn.Linear"], [])
        for stage in STAGES
    ]
    for first, others in ((results[0], results[1:4]), (results[4], results[5:])):
        for losses, got in others:
            assert losses == first[0]
            assert all(got[name].equal(value) for name, value in first[1].items())
    assert any(not results[0][1][name].equal(value) for name, value in results[4][1].items())


def train_six(engine: tessera.Engine, rank: int) -> tuple[list[float], dict[str, Any]]:
    return train(engine, rank, 6)


@pytest.mark.parametrize("stage", STAGES)
def test_communication_data_type(stage: int) -> None:
    """What travels where autocast says nothing; a mark wins over it."""
    model = make(width=33)
    _, want = plain_loop(copy.deepcopy(model), 2, 3, FP16, others=BF16)
    more = {"communication_data_type": "bf16"}
    for _, got in engines(model, 2, cast_config(stage, "fp16", **more), lambda engine, rank: train(engine, rank, 3)):
        assert all(got[name].equal(value) for name, value in want.items())

    def gradients(engine: tessera.Engine, rank: int) -> list[torch.Tensor]:
        engine(*batch(rank)).backward()
        grads = [tessera.state.get_full_grad(engine, p) for p in engine.module.parameters()]
        engine.step()
        return grads

    exact = engines(model, 2, config(stage), gradients)[0]
    for grad, near in zip(engines(model, 2, config(stage, **more), gradients)[0], exact, strict=True):
        assert grad.dtype == FP32 and grad.equal(grad.bfloat16().float()) and not near.equal(near.bfloat16().float())
        torch.testing.assert_close(grad, near, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_the_region_is_forward_only(stage: int) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        seen = products(engine.module)
        cached: list[bool] = []
        engine.module.embed.register_forward_hook(lambda *_: cached.append(torch.is_autocast_cache_enabled()))
        x, y = batch(rank)
        out = engine(x)
        assert set(seen) == {BF16} and out.dtype == FP32, "a Linear in bf16; the gain is fp32"
        assert cached == [False] and torch.is_autocast_cache_enabled()
        assert not torch.is_autocast_enabled("cpu")
        with pytest.raises(TypeError):
            engine(x, "no tensor")
        with pytest.raises(RuntimeError):
            engine(x[:, :2])
        assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
        mse(engine(x), y).backward()
        for param in engine.module.parameters():
            assert param.dtype == FP32 and tessera.state.get_full_grad(engine, param).dtype == FP32
        engine.step()
        assert not engine.loss_scaler.needed
        del seen[:]
        with tessera.zero.GatheredParameters(engine.module.parameters()):
            engine.module(x)
        assert set(seen) == {FP32}, "a module called directly"

    engines(make(), 2, cast_config(stage), body)


@pytest.mark.parametrize("stage", [1, 3])
def test_regions_around_forward(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        seen = products(engine.module)
        enabled = engine.config.get("torch_autocast.enabled")
        for step in range(3):
            with torch.autocast("cpu", dtype=FP16):
                loss = engine(*batch(rank))
                assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == FP16
                assert torch.get_autocast_dtype("cpu") == FP16 and torch.is_autocast_cache_enabled()
                with torch.no_grad():
                    engine(*batch(rank))
            assert set(seen) == {BF16 if enabled else FP32}, step
            engine.backward(loss)
            engine.step()

    with caplog.at_level(logging.WARNING, logger="tessera"):
        engines(make(), 2, cast_config(stage), body)
        assert not caplog.records
        plain, alone = engines(make(), 2, config(stage, optimizer=ADAM), train_six), caplog.records[:]
        engines(make(), 2, config(stage, optimizer=ADAM), body)
    assert not alone and plain
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and "torch_autocast" in lines[0] and lines[0].startswith("[engine]"), lines


def test_fp32_is_autocast_switched_off_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    engine = tessera.Engine(make(), cast_config(dtype="fp32"))
    seen = products(engine.module)
    with torch.autocast("cpu", dtype=BF16), caplog.at_level(logging.WARNING, logger="tessera"):
        engine(*batch(0)).backward()
    assert set(seen) == {FP32} and not caplog.records and not engine.loss_scaler.needed
    engine.destroy()


class Shared(Net):
    """One Linear in two places, the first under no_grad."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        with torch.no_grad():
            before = self.features(x)
        x = self.features(x)
        out = self.head(self.blocks[0](x + before)) * self.gain
        return out if y is None else mse(out, y)


@pytest.mark.parametrize("stage", STAGES)
def test_no_cast_outlives_its_weights(stage: int) -> None:
    """Evaluation inside a step, several forwards, and a no_grad part of forward in one region of the caller's: torch's
    cache would give old casts, or casts without a graph. By hand it is off."""
    model = make(Shared, width=33)

    def uncached(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=BF16, cache_enabled=False):
            return m(x, y) + m(x[:2], y[:2])

    _, want = plain_loop(copy.deepcopy(model), 2, 4, BF16, run=uncached)

    def body(engine: tessera.Engine, rank: int) -> Any:
        with torch.autocast("cpu", dtype=BF16):
            for step in range(4):
                x, y = batch(10 * rank + step)
                with torch.no_grad():
                    engine.eval()(x)
                loss = engine.train()(x, y) + engine(x[:2], y[:2])
                with torch.no_grad():
                    held_out = engine(x, y)
                with torch.autocast("cpu", enabled=False):
                    loss.backward()
                with torch.no_grad():
                    assert engine(x, y) == held_out
                engine.step()
                with torch.no_grad():
                    assert engine(x, y) != held_out
        return masters(engine)

    for got in engines(model, 2, cast_config(stage), body):
        for name, value in want.items():
            # A weight used several times: its gradients add up in whichever order autograd takes.
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


class Checkpointed(Net):
    reentrant = False

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_recomputation_runs_in_the_region_of_its_forward(stage: int, reentrant: bool) -> None:
    model = make(Checkpointed, width=33)
    model.reentrant = reentrant
    losses, want = plain_loop(make(Net, width=33), 2, 3, BF16)
    for number, (got_losses, got) in enumerate(
        engines(model, 2, cast_config(stage), lambda engine, rank: train(engine, rank, 3))
    ):
        assert number or got_losses == losses
        assert all(got[name].equal(value) for name, value in want.items())


@pytest.mark.parametrize("stage", STAGES)
def test_one_forward_inside_another(stage: int) -> None:
    """An engine whose module calls an engine of another mode."""
    models = make(Net, width=7), make(Net, width=9, seed=1)

    def body(rank: int, group: tessera.Group) -> None:
        inner = tessera.Engine(copy.deepcopy(models[1]), cast_config(stage, "fp16"), group=group)
        plain = tessera.Engine(copy.deepcopy(models[1]), config(stage), group=group)

        class Outer(Net):
            def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
                first = self.embed(x).dtype
                parts = helpers[0](x), helpers[1](x)
                assert self.embed(x).dtype == first == BF16
                return mse(super().forward(x) + parts[0] + parts[1], batch(rank)[1])

        helpers = [inner, plain]
        seen = products(inner.module), products(plain.module)
        own = Outer()
        own.load_state_dict(models[0].state_dict())
        outer = tessera.Engine(own, cast_config(stage), group=group)
        inner.loss_scaler.loss_scale = 64
        for _ in range(2):
            outer.scale(inner.scale(outer(batch(rank)[0]))).backward()
            for engine in (outer, inner, plain):
                engine.step()
                assert engine.was_step_applied()
        assert set(seen[0]) == {FP16} and set(seen[1]) == {FP32}
        for engine in (outer, inner, plain):
            engine.destroy()

    run_ranks(2, body)


@pytest.mark.parametrize("stage", STAGES)
def test_engines_of_different_modes_in_one_process(stage: int) -> None:
    """Each trains as if it were alone, at the same time, forwards of one between forward and backward of others."""
    model = make(width=33)
    modes = [
        cast_config(stage, "bf16"),
        cast_config(stage, "fp16"),
        config(stage, optimizer=ADAM),
        cast_config(stage, "bf16", bf16={"enabled": True}),
    ]
    alone = [engines(model, 2, cfg, train_six)[0] for cfg in modes]

    def body(rank: int, group: tessera.Group) -> Any:
        many = [tessera.Engine(copy.deepcopy(model), cfg, group=group) for cfg in modes]
        losses: list[list[float]] = [[] for _ in many]
        for step in range(6):
            pending = [engine(*batch(10 * rank + step)) for engine in many]
            for engine, loss, seen in zip(many, pending, losses, strict=True):
                seen.append(loss.item())
                engine.backward(loss)
            for engine in many:
                engine.step()
        found = [masters(engine) for engine in many]
        assert [engine.loss_scaler.needed for engine in many] == [False, True, False, False]
        for engine in many:
            engine.destroy()
        return losses, found

    losses, found = run_ranks(2, body)[0]
    for seen, got, (want_losses, want) in zip(losses, found, alone, strict=True):
        assert seen == want_losses
        assert all(got[name].equal(value) for name, value in want.items())


# ---------------------------------------------------------------- fp16


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_fp16_has_the_rules_of_torch_gradscaler(stage: int, world: int) -> None:
    """Against torch.amp.GradScaler step by step: scale, skips, schedule; clipping on unscaled gradients."""
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_min_lr": 0.02, "warmup_max_lr": 0.1}}
    bad = [True, True, False, True, False, False]
    torch_scaler = torch.amp.GradScaler("cpu")
    param = nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([param], lr=0.1)
    scales = []
    for overflow in bad:
        torch_scaler.scale(param.sum() * (float("inf") if overflow else 1.0)).backward()
        torch_scaler.step(sgd)
        torch_scaler.update()
        sgd.zero_grad()
        scales.append(torch_scaler.get_scale())

    def body(engine: tessera.Engine, rank: int) -> None:
        assert engine.loss_scaler.loss_scale == 65536 and engine.loss_scaler.dynamic
        assert stage == 0 or engine.optimizer.needs_scaler()
        with pytest.raises(RuntimeError, match="Loss scaling is required"):
            engine(*batch(rank)).backward()
        for number, overflow in enumerate(bad):
            before, done = weights(engine.module), engine.lr_scheduler.last_batch_iteration
            for micro in range(2):
                loss = engine(*batch(rank))
                # On one rank and in one micro-batch only.
                engine.scale(loss * float("inf") if overflow and micro == 0 and rank == world - 1 else loss).backward()
                engine.step()
            assert engine.was_step_applied() is not overflow
            assert stage == 0 or engine.optimizer.overflow is overflow
            assert engine.skipped_steps == sum(bad[: number + 1]) and engine.global_steps == number + 1
            assert engine.lr_scheduler.last_batch_iteration == done + (not overflow)
            assert engine.loss_scaler.loss_scale == scales[number], "updated once for each step"
            assert all(v.equal(before[n]) for n, v in weights(engine.module).items()) is overflow
        assert engine.global_grad_norm() < 100, "of unscaled gradients"

    engines(make(), world, cast_config(stage, "fp16", 2, scheduler=schedule, gradient_clipping=0.1), body)


@pytest.mark.parametrize("stage", STAGES)
def test_fp16_clips_unscaled_gradients(stage: int) -> None:
    model = make(width=33)
    _, want = plain_loop(copy.deepcopy(model), 2, 3, FP16, clip=0.05)
    cfg = cast_config(stage, "fp16", gradient_clipping=0.05)
    for _, got in engines(model, 2, cfg, lambda engine, rank: train(engine, rank, 3)):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_too_large_for_what_travels_is_an_overflow(stage: int) -> None:
    """Finite in fp32 on every rank, beyond fp16 on its way: all ranks skip."""

    def body(engine: tessera.Engine, rank: int) -> None:
        before = weights(engine.module)
        for applied in (False, True):
            big = 1e5 if rank == 0 and not applied else 1.0
            with tessera.zero.GatheredParameters(engine.module.parameters()):
                term = engine.module.head.bias.sum()
            engine.backward(engine(*batch(rank)) + 0 * term if applied else engine(*batch(rank)) * 0 + term * big)
            engine.step()
            assert engine.was_step_applied() is applied
            assert all(v.equal(before[n]) for n, v in weights(engine.module).items()) is not applied

    engines(make(), 2, cast_config(stage, "fp16"), body)


# ---------------------------------------------------------------- marks and helpers


class Special(nn.Linear):
    pass


class Mixed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.special = Special(7, 7)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.table = nn.Embedding(4, 7)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.special(super().features(x)) + self.table.weight[0]
        return self.conv(x.unsqueeze(1)).squeeze(1)


def test_marks() -> None:
    """Exact classes and the parameters they own; per engine."""
    model = make(Mixed)
    names = {name for name, _ in model.named_parameters()}
    linear = {n for n in names if n.startswith(("embed", "head")) or ".linear." in n}

    def marked() -> set[str]:
        found = {name for name, p in model.named_parameters() if autocast.has_comm_dtype(p)}
        assert autocast.is_autocast_initialized(model) is bool(found)
        assert autocast.has_autocast_dtype is autocast.has_comm_dtype
        assert all(
            getattr(p, autocast.PARAM_COMM_DTYPE_ATTR_NAME) == BF16
            for p in model.parameters()
            if hasattr(p, "comm_dtype")
        )
        return found

    for listed, want in (
        (None, linear | {"conv.weight", "conv.bias"}),
        (["torch.nn.Linear"], linear),
        (["torch.nn.modules.linear.Linear", "torch.nn.Embedding"], linear | {"table.weight"}),
        ([f"{__name__}.Special"], {"special.weight", "special.bias"}),
        ([f"{__name__}.Mixed"], {"gain"}),
        ([], set()),
    ):
        section = {} if listed is None else {"lower_precision_safe_modules": listed}
        engine = tessera.Engine(model, cast_config(section=section))
        assert marked() == want
        assert autocast.is_autocast_initialized(engine) is bool(want)
        engine.destroy()
        assert marked() == set(), "taken off"
    engine = tessera.Engine(model, config())
    assert marked() == set() and not autocast.is_autocast_initialized(engine)
    engine.destroy()

    # By hand, for an engine built later.
    added = autocast.init_autocast_params(model, BF16, ["torch.nn.LayerNorm"])
    assert marked() == {n for n in names if ".norm." in n} and len(added) == 4
    engine = tessera.Engine(model, cast_config())
    assert marked() == {n for n in names if ".norm." in n} | linear | {"conv.weight", "conv.bias"}
    assert engine.core.params()[2].comm == BF16
    engine.destroy()
    assert marked() == {n for n in names if ".norm." in n}, "marks of the user's stay"


def test_helpers() -> None:
    assert autocast.get_default_autocast_lower_precision_modules() == [
        "torch.nn.modules.linear.Linear",
        "torch.nn.modules.conv.Conv1d",
        "torch.nn.modules.conv.Conv2d",
        "torch.nn.modules.conv.Conv3d",
    ]
    model = make()
    assert len(autocast.init_autocast_params(model, FP16)) == 8
    assert autocast.get_comm_dtype(model.head.weight) == FP16 and autocast.get_comm_dtype(model.gain) == FP32
    assert autocast.get_all_comm_dtypes(model.parameters()) == {FP16, FP32}
    assert autocast.sort_dtypes({FP32, FP16, BF16}) == [BF16, FP16, FP32]
    for cfg, dtype in ((cast_config(dtype="fp16"), FP16), (cast_config(), BF16), (cast_config(dtype="fp32"), FP32)):
        engine = tessera.Engine(make(), cfg)
        with torch.autocast("cpu", dtype=BF16), autocast.autocast_if_enabled(engine):
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == dtype
        engine.destroy()
    engine = tessera.Engine(make(), config())
    with torch.autocast("cpu", dtype=FP16), autocast.autocast_if_enabled(engine):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == FP16
    engine.destroy()


def test_errors() -> None:
    for name in ("torch.nn.Lineal", "no_such_module.Linear", "Linear", "torch.nn.functional.linear", ""):
        with pytest.raises(ValueError, match=r"^Failed to import lower precision safe module"):
            tessera.Engine(make(), cast_config(section={"lower_precision_safe_modules": [name]}))
    for unread, text in ((nn.Linear, "cannot read a value of type"), (1, "list of texts")):
        with pytest.raises(ValueError, match=text):
            tessera.Engine(make(), cast_config(section={"lower_precision_safe_modules": [unread]}))
    for bad in ("torch.nn.Linear", [nn.Linear]):
        with pytest.raises(ValueError, match="must be a list"):
            autocast.init_autocast_params(make(), BF16, bad)
    with pytest.raises(ValueError, match=r"torch_autocast\.dtype"):
        tessera.Engine(make(), cast_config(dtype="int8"))
    for text in ("torch.bfloat16", "bfloat16", BF16):
        engine = tessera.Engine(make(), cast_config(dtype=text))  # type: ignore[arg-type]
        assert engine.core.options().autocast.dtype == BF16
        engine.destroy()


def test_fp16_auto_cast_casts_inputs() -> None:
    class Keeps(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            assert x.dtype == FP16 and (y is None or y.dtype == FP16)
            return super().forward(x, y)

    engine = tessera.Engine(make(Keeps), config(1, fp16={"enabled": True, "auto_cast": True}))
    engine.backward(engine(*batch(0)))
    engine.step()
    assert engine(x=batch(0)[0]).dtype == FP16
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_grows(stage: int) -> None:
    """Buckets of what travels come from pools: after the first steps their bytes stay."""

    def body(engine: tessera.Engine, rank: int) -> None:
        bytes_ = []
        for step in range(5):
            engine(*batch(rank + step)).backward()
            engine.step()
            bytes_.append(engine.core.memory().buckets)
        assert bytes_[2] == bytes_[3] == bytes_[4]

    engines(make(width=33, blocks=6), 2, cast_config(stage, tessera={"min_unit_elements": 1}), body)
