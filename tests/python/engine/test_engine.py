"""The engine's surface: accumulation, boundaries, counters, life."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    Net,
    applied_step,
    assert_close,
    batch,
    config,
    engines,
    full_grads,
    make,
    masters,
    micro,
    mse,
    plain_grads,
    run_ranks,
    same_bits,
    same_gradients,
    shard_group,
    weights,
)
from tessera.errors import UsageError
from torch import nn

import tessera

STAGES = [0, 1, 2, 3]


def several(model: Any, rank: int, count: int) -> None:
    for k in range(count):
        model(*batch(10 * rank + k)).backward()


@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_and_counters(stage: int) -> None:
    model = make()
    before = weights(model)

    def body(engine: tessera.Engine, rank: int) -> Any:
        assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (4 * 3 * 2, 4)
        assert engine.gradient_accumulation_steps() == 3
        assert not engine.was_step_applied() and engine.global_grad_norm() is None
        for k in range(6):
            assert engine.is_gradient_accumulation_boundary() == (k % 3 == 2)
            micro(engine, 10 * rank + k)
            assert engine.was_step_applied() == (k % 3 == 2)
            if k < 2:
                assert_close(weights(engine.module), before)
            assert (engine.micro_steps, engine.global_steps) == (k + 1, (k + 1) // 3)
        assert engine.global_samples == 2 * 24 and engine.skipped_steps == 0
        assert engine.global_grad_norm() > 0
        return weights(engine.module)

    plain = copy.deepcopy(model)
    for step in range(2):
        grads = plain_grads(
            plain, 2, lambda m, rank, s=step: [m(*batch(10 * rank + 3 * s + k)).backward() for k in range(3)], 1 / 3
        )
        with torch.no_grad():
            for name, param in plain.named_parameters():
                param -= 0.1 * grads[name]
    for got in engines(model, 2, config(stage, accumulation=3), body):
        assert_close(got, weights(plain))


@pytest.mark.parametrize("stage", STAGES)
def test_manual_boundary(stage: int) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        for k in range(4):
            engine.set_gradient_accumulation_boundary(k == 3)
            assert engine.is_gradient_accumulation_boundary() == (k == 3)
            engine(*batch(10 * rank + k)).backward()
            if k < 3:
                engine.step()
                assert not engine.was_step_applied()

    same_gradients(make(), 2, config(stage), body, lambda m, rank: several(m, rank, 4), applied_step)


@pytest.mark.parametrize("stage", STAGES)
def test_unmanaged_accumulation_equals_managed(stage: int) -> None:
    """Every step() is a boundary, however many backwards came before; averaging divides by the configured steps."""

    def managed(engine: tessera.Engine, rank: int) -> Any:
        for k in range(6):
            micro(engine, 10 * rank + k)
        return weights(engine.module)

    def unmanaged(engine: tessera.Engine, rank: int) -> Any:
        with pytest.raises(tessera.UsageError, match="boundary"):
            engine.set_gradient_accumulation_boundary(True)
        for step in range(2):
            for k in range(3):
                engine(*batch(99))  # without a backward: no samples
                engine(*batch(10 * rank + 3 * step + k)).backward()
            engine.step()
            assert engine.was_step_applied()
            assert engine.global_samples == 4 * 2 * 3 * (step + 1), "micro batch x ranks x backwards"
        return weights(engine.module)

    model = make()
    want = engines(model, 2, config(stage, accumulation=3), managed)[0]
    cfg = config(stage, accumulation=3, managed_gradient_accumulation=False)
    for got in engines(model, 2, cfg, unmanaged):
        assert_close(got, want)


@pytest.mark.parametrize("stage", STAGES)
def test_no_sync_is_local(stage: int) -> None:
    model = make()

    def body(engine: tessera.Engine, rank: int) -> None:
        shard_group(engine).reset_stats()
        with engine.no_sync():
            engine(*batch(rank)).backward()
            stats = shard_group(engine).stats()
            assert stats.all_reduce.calls + stats.reduce_scatter.calls == 0
            assert stage == 3 or stats.all_gather.calls == 0
            local = {name: tessera.state.get_full_grad(engine, p) for name, p in engine.module.named_parameters()}
            assert_close(local, plain_grads(model, 1, lambda m, _: m(*batch(rank)).backward()))
            with pytest.raises(RuntimeError, match="step"):
                engine.step()
            with pytest.raises(RuntimeError, match="no_sync"), engine.no_sync():
                pass
        engine(*batch(rank + 10)).backward()

    def plain(m: nn.Module, rank: int) -> None:
        m(*batch(rank)).backward()
        m(*batch(rank + 10)).backward()

    same_gradients(model, 2, config(stage), body, plain)


@pytest.mark.parametrize("stage", STAGES)
def test_coalesced_reduction(stage: int) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        shard_group(engine).reset_stats()
        with engine.coalesce_grad_reduction():
            several(engine, rank, 3)
            stats = shard_group(engine).stats()
            assert stats.all_reduce.calls + stats.reduce_scatter.calls == 0
            with pytest.raises(RuntimeError, match="coalesce_grad_reduction"):
                engine.step()
            with pytest.raises(RuntimeError, match="no_sync"), engine.no_sync():
                pass

    same_gradients(make(), 2, config(stage), body, lambda m, rank: several(m, rank, 3), applied_step)


@pytest.mark.parametrize("call", ["engine", "module", "optimizer"])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_makes_a_replay_bit_equal(stage: int, bf16: bool, call: str) -> None:
    def body(engine: tessera.Engine, rank: int) -> Any:
        engine(*batch(rank + 50)).backward()
        (engine if call == "engine" else getattr(engine, call)).zero_grad()
        assert all(p.grad is None for p in engine.module.parameters())
        engine(*batch(rank)).backward()
        engine.step()
        return weights(engine.module)

    def direct(engine: tessera.Engine, rank: int) -> Any:
        micro(engine, rank)
        return weights(engine.module)

    model = make()
    cfg = config(stage, bf16=bf16)
    for got, want in zip(engines(model, 2, cfg, body), engines(model, 2, cfg, direct), strict=True):
        assert same_bits(got, want)


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_and_norms(stage: int) -> None:
    model = make()
    expected = plain_grads(model, 2, lambda m, rank: m(*batch(rank)).backward())
    norm = torch.cat([g.flatten() for g in expected.values()]).norm().item()
    limit = norm / 3

    def body(engine: tessera.Engine, rank: int) -> Any:
        engine(*batch(rank)).backward()
        assert engine.grad_norm() == pytest.approx(norm, rel=1e-5)
        assert engine.global_grad_norm() is None
        engine.step()
        assert engine.global_grad_norm() == pytest.approx(norm, rel=1e-5)
        return weights(engine.module)

    want = {n: p - 0.1 * expected[n] * limit / (norm + 1e-6) for n, p in weights(model).items()}
    for got in engines(model, 2, config(stage, gradient_clipping=limit), body):
        assert_close(got, want)


@pytest.mark.parametrize("way", ["fp32", "bf16", "fp16", "client", "torch"])
@pytest.mark.parametrize("stage", STAGES)
def test_clipping_by_hand_equals_the_configured(stage: int, way: str) -> None:
    """engine.clip_grad_norm_() is what torch's function is for gradients in p.grad."""
    modes: dict[str, Any] = {"bf16": {"enabled": True}, "fp16": {"enabled": True, "loss_scale": 8.0}}
    more = {name: mode for name, mode in modes.items() if name == way}
    rate = torch.tensor(0.1) if way == "client" else 0.1

    def factory(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=rate)

    def train(clipping: float) -> Any:
        def body(engine: tessera.Engine, rank: int) -> Any:
            for k in range(4):
                engine.backward(engine(*batch(10 * rank + k)))
                if clipping == 0 and k % 2:
                    norm = engine.grad_norm()
                    if way == "torch":  # its function sees the gradients of stage 0, and none elsewhere
                        seen = nn.utils.clip_grad_norm_(engine.parameters(), 0.1)
                        assert seen.item() == pytest.approx(0.0 if stage else norm)
                        norm = engine.grad_norm()
                    for limit in (100.0, 0.1):
                        assert engine.clip_grad_norm_(limit).item() == pytest.approx(norm)
                    assert engine.grad_norm() == pytest.approx(0.1, rel=1e-2 if more else 1e-4)
                engine.step()
            return weights(engine.module)

        return engines(make(), 2, config(stage, 2, gradient_clipping=clipping, **more), body, client=factory)

    for got, want in zip(train(0.0), train(0.1), strict=True):
        assert_close(got, want, bf16=bool(more))


def test_clipping_by_hand_leaves_what_is_not_finite_to_the_step() -> None:
    engine = tessera.Engine(make(), config(2, bf16=True))
    engine.backward(engine(*batch(0)) * float("inf"))
    assert not engine.clip_grad_norm_(1.0).isfinite()
    engine.step()
    assert engine.skipped_steps == 1
    with pytest.raises(NotImplementedError, match="norm_type"):
        engine.clip_grad_norm_(1.0, norm_type=1.0)
    engine.destroy()


def test_clipping_is_on_by_default() -> None:
    cfg = config()
    del cfg["gradient_clipping"]
    engine = tessera.initialize(model=make(), config=cfg)[0]
    assert engine.config.get("gradient_clipping") == 1.0
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_nan_gradients_skip_the_step_in_bf16(stage: int) -> None:
    model = make()

    def body(engine: tessera.Engine, rank: int) -> Any:
        before = weights(engine.module)
        x, y = batch(rank)
        if rank == 1:  # one rank's NaN stops all
            x = x * float("nan")
        engine(x, y).backward()
        engine.step()
        assert not engine.was_step_applied()
        assert (engine.skipped_steps, engine.global_steps) == (1, 1)
        assert engine.lr_scheduler.last_batch_iteration == -1
        assert engine.optimizer.overflow
        after = weights(engine.module)
        assert same_bits(before, after)
        micro(engine, rank)
        assert engine.was_step_applied() and not engine.optimizer.overflow
        assert engine.lr_scheduler.last_batch_iteration == 0
        return None

    cfg = config(stage, bf16=True, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}})
    engines(model, 2, cfg, body)


def test_gradient_is_live_at_stage_0() -> None:
    """The mean over ranks, and what the user sets there counts."""
    model = make()
    expected = plain_grads(model, 2, lambda m, rank: m(*batch(rank)).backward())

    def body(engine: tessera.Engine, rank: int) -> Any:
        engine(*batch(rank)).backward()
        seen = {name: p.grad for name, p in engine.module.named_parameters()}
        assert_close(seen, expected)
        engine.module.gain.grad.mul_(10)
        engine.module.head.bias.grad = torch.full_like(engine.module.head.bias, 2.0)
        engine.module.embed.bias.grad = None
        engine.step()
        return weights(engine.module)

    want = {n: p - 0.1 * expected[n] for n, p in weights(model).items()}
    want["gain"] = model.gain - expected["gain"]
    want["head.bias"] = model.head.bias - 0.2
    want["embed.bias"] = model.embed.bias
    for got in engines(model, 2, config(0), body):
        assert_close(got, want)


def test_gradients_filled_by_hand_at_stage_0() -> None:
    """A script may fill p.grad itself and never call backward."""
    model = make()
    before = weights(model)
    engine = tessera.Engine(model, config(0))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    engine.step()
    assert_close(weights(model), {n: p - 0.1 for n, p in before.items()})
    engine.destroy()


@pytest.mark.parametrize(
    "loss", [3.0, torch.ones(2, requires_grad=True) * 2, torch.tensor(1.0)], ids=["number", "vector", "no graph"]
)
def test_wrong_losses(loss: Any) -> None:
    engine = tessera.Engine(make(), config())
    with pytest.raises(ValueError, match="scalar tensor"):
        engine.backward(loss)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        assert engine.scale(loss) is loss, "outputs of any shape may be scaled"
    else:
        with pytest.raises(ValueError, match="scalar tensor"):
            engine.scale(loss)
    with torch.no_grad():
        out = engine(*batch(0))
    with pytest.raises(ValueError, match="loss must be a scalar tensor"):
        engine.backward(out)
    loss = engine(*batch(0))
    assert engine.scale(loss).item() == loss.item()
    engine.destroy()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_destroy_and_build_again(stage: int, bf16: bool) -> None:
    model = make()
    engine = tessera.Engine(model, config(stage, bf16=bf16))
    micro(engine, 0)
    with pytest.raises(ValueError, match="engine"):
        tessera.Engine(model, config(stage, bf16=bf16))  # one engine at a time
    values = weights(model)
    engine.destroy()
    engine.destroy()
    assert all(torch.equal(value, p) for value, p in zip(values.values(), model.parameters(), strict=True))
    with pytest.raises(RuntimeError, match="destroyed"):
        engine(*batch(0))
    for call in ("save_checkpoint", "load_checkpoint", "save_16bit_model", "wait_for_checkpoint"):
        with pytest.raises(tessera.UsageError, match=rf"\[engine\] {call}: the engine was destroyed"):
            getattr(engine, call)(*([] if call.startswith("wait") else ["nowhere"]))
    mse(model(batch(0)[0]), batch(0)[1]).backward()  # a plain module again
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    other = tessera.Engine(model, config((stage + 1) % 3, bf16=bf16))
    micro(other, 1)
    assert other.was_step_applied()
    other.destroy()


def test_an_engine_without_owner_lets_go_of_its_module() -> None:
    model = make()
    for stage in STAGES:
        engine = tessera.initialize(model=model, config=config(stage))[0]
        micro(engine, stage)
        del engine
    tessera.Engine(model, config()).destroy()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ["module", "engine", "submodule"])
def test_loading_weights_after_initialize(stage: int, bf16: bool, way: str) -> None:
    """What was loaded is what is trained: masters follow."""
    source = make(Net, seed=5)
    dtype = torch.bfloat16 if bf16 else torch.float32

    def load(engine: tessera.Engine) -> None:
        state = {name: value.clone() for name, value in source.state_dict().items()}
        if way == "engine":
            engine.load_module_state_dict(state)
            return
        with tessera.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
            if way == "module":
                engine.module.load_state_dict(state)
            else:
                for name in ("embed", "blocks", "head"):
                    getattr(engine.module, name).load_state_dict(getattr(source, name).state_dict())
                with torch.no_grad():
                    engine.module.gain.copy_(source.gain)

    def body(engine: tessera.Engine, rank: int) -> None:
        micro(engine, rank)
        load(engine)
        engine(*batch(rank)).backward()
        grads = full_grads(engine)
        engine.step()
        for name, param in weights(engine.module).items():
            loaded = source.get_parameter(name)
            want = (loaded if way == "engine" else loaded.to(dtype).float()) - 0.1 * grads[name]
            torch.testing.assert_close(param.float(), want.to(dtype).float(), rtol=1e-2 if bf16 else 1e-5, atol=1e-5)
        before = weights(engine.module)
        load(engine)
        # Those of weights that are what they were keep their bits.
        for name, master in masters(engine).items():
            loaded = source.get_parameter(name).float()
            if way == "engine":  # whatever was there before
                assert torch.equal(master, loaded), name
                continue
            loaded = loaded.to(dtype).float()
            changed = before[name].float() != loaded
            assert torch.equal(master[changed], loaded[changed]), name
            assert torch.equal(master.to(dtype).float(), loaded), name

    engines(make(), 2, config(stage, bf16=bf16), body)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ["strict=False", "custom_load_fn"])
def test_a_partial_load_leaves_other_masters_exact(stage: int, way: str) -> None:
    """bf16: parameters that were not loaded keep the bits of their fp32 masters."""
    loaded = make(Net, seed=5).head.weight.detach()

    def write(state: dict[str, Any], module: nn.Module) -> None:
        module.head.weight.data.copy_(state["head.weight"])  # .data: torch counts no version

    def body(engine: tessera.Engine, rank: int) -> None:
        micro(engine, rank)
        before = masters(engine)
        assert any(not torch.equal(v, v.bfloat16().float()) for v in before.values()), "masters hold more than bf16"
        fn = {"custom_load_fn": write} if way == "custom_load_fn" else {}
        engine.load_module_state_dict({"head.weight": loaded}, strict=False, **fn)
        after = masters(engine)
        want = loaded if way == "strict=False" else loaded.bfloat16().float()
        assert torch.equal(after.pop("head.weight"), want)
        assert all(torch.equal(value, before[name]) for name, value in after.items())

    engines(make(), 2, config(stage, bf16=True), body)


UNFIT: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "meta": ("is on the meta device there, and has no values", lambda value: value.to("meta")),
    "complex": ("is complex there and real here", lambda value: value.to(torch.complex64)),
    "sparse": ("is sparse or quantized there; make it dense", lambda value: value.to_sparse()),
}


@pytest.mark.parametrize("wrong", UNFIT)
@pytest.mark.parametrize("stage", STAGES)
def test_values_that_cannot_be_are_refused_before_anything_changes(stage: int, wrong: str) -> None:
    says, spoil = UNFIT[wrong]

    def body(engine: tessera.Engine, rank: int) -> None:
        before = {name: value.clone() for name, value in engine.module_state_dict().items()}
        state = {name: value + 1 for name, value in before.items()}
        weight = state["head.weight"]
        if stage < 3 or rank == 1:  # where ranks wait for each other, one is enough
            state["head.weight"] = spoil(weight)
        with pytest.raises(tessera.ConfigError, match=f"'head.weight' {says}"):
            engine.load_module_state_dict(state)
        assert all(torch.equal(value, before[name]) for name, value in engine.module_state_dict().items())

    engines(make(), 2, config(stage), body)


def test_ranks_start_with_the_values_of_rank_0() -> None:
    def body(rank: int, group: tessera.Group) -> Any:
        torch_lock_free = models[rank]
        torch_lock_free.head.bias.requires_grad_(False)
        engine = tessera.Engine(torch_lock_free, config(1), group=group)
        values = weights(engine.module)
        engine.destroy()
        return values

    models = [make(Net, seed=rank) for rank in range(3)]
    want = weights(models[0])
    for values in run_ranks(3, body):
        assert same_bits(values, want)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_calls_come_from_one_thread_at_a_time(stage: int, tmp_path: Path) -> None:
    model = make()
    engine = tessera.Engine(model, config(stage))
    weight = next(model.parameters())
    loss, x = engine(*batch(0)), batch(0)[0]

    def gather() -> None:
        with tessera.zero.GatheredParameters([weight], modifier_rank=0):
            pass

    calls: list[Callable[[], object]] = [
        lambda: loss.backward(),
        gather,
        lambda: engine.mean(x),
        lambda: engine.token_mean(x.sum(), torch.tensor(1)),
        lambda: tessera.state.get_full_fp32_param(engine, weight),
        lambda: engine.set_train_batch_size(8),
        lambda: engine.set_gradient_accumulation_boundary(False),
        lambda: engine.wait_for_checkpoint(),
        lambda: engine.save_checkpoint(tmp_path),
    ]
    errors: list[str] = []

    def of_another_thread(call: Callable[[], object]) -> None:
        with pytest.raises((UsageError, RuntimeError)) as error:
            call()
        errors.append(str(error.value))

    def inside(*_: Any) -> None:
        for call in calls:
            thread = threading.Thread(target=of_another_thread, args=(call,))
            thread.start()
            thread.join()
        reader = threading.Thread(target=lambda: (engine.global_steps, engine.gradient_accumulation_steps()))
        reader.start()
        reader.join()

    hook = model.register_forward_pre_hook(inside)
    engine(*batch(1))
    hook.remove()
    assert len(errors) == len(calls)
    assert all("another thread is in forward" in error for error in errors), errors
    micro(engine, 2)
    engine.destroy()


def test_progress_line(caplog: pytest.LogCaptureFixture) -> None:
    engine = tessera.Engine(make(), config(steps_per_print=2))
    with caplog.at_level("INFO", logger="tessera"):
        for k in range(4):
            micro(engine, k)
    lines = [r.message for r in caplog.records if r.message.startswith("step=")]
    assert len(lines) == 2 and lines[1].startswith("step=4, skipped=0, lr=[0.1]")
    engine.destroy()


def test_sums_and_means_over_the_ranks_of_the_batch() -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        value = torch.tensor([1.0 + rank, 3.0], requires_grad=True)
        assert engine.sum(value).tolist() == [3.0, 6.0]
        assert engine.mean(value).tolist() == [1.5, 3.0]
        assert engine.mean(torch.tensor(rank)).item() == 0.5
        # Losses of 4 and 5, of 1 and 3 tokens.
        loss = engine.token_mean(value.sum(), torch.tensor(1 + 2 * rank))
        loss.backward()
        assert value.grad is not None and value.grad.tolist() == [0.5, 0.5]
        assert engine.mean(loss).item() == 9 / 4
        with pytest.raises(tessera.ConfigError, match="no rank has a token"):
            engine.token_mean(value.sum(), torch.tensor(0))

    engines(make(), 2, config(), body)
