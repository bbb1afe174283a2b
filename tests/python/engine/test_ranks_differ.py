"""Ranks that differ where they must not: an error on all of them, at the next step at the latest, that names it."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import (
    OPTIMIZERS,
    assert_close,
    batch,
    config,
    engines,
    free_port,
    make,
    masters,
    micro,
    run_processes,
    run_ranks,
    same_bits,
    weights,
)

import tessera


def refusals(world: int, body: Callable[[int, tessera.Group], None]) -> list[str]:
    """What every rank says, which must be the same."""

    def run(rank: int, group: tessera.Group) -> str:
        with pytest.raises(ValueError) as refused:
            body(rank, group)
        return str(refused.value)

    texts = run_ranks(world, run)
    assert len(set(texts)) == 1, texts
    return texts


def set_rate(engine: Any, value: float) -> None:
    for group in engine.basic_optimizer.param_groups:
        group["lr"] = torch.full_like(group["lr"], value) if isinstance(group["lr"], torch.Tensor) else value


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("client", [None, "adamw", "rmsprop", "tensor lr"])
@pytest.mark.parametrize("world", [2, 3])
def test_rates(world: int, client: str | None, stage: int) -> None:
    """As a ReduceLROnPlateau over losses of one rank sets them; nothing is updated, and equal ones go on."""

    def body(rank: int, group: tessera.Group) -> None:
        model = make()
        own = None if client is None else OPTIMIZERS[client](model.parameters())
        cfg = config(stage, zero_allow_untested_optimizer=True)
        engine = tessera.Engine(model, cfg, optimizer=own, group=group)
        micro(engine, rank)
        set_rate(engine, 0.01)
        before = engine.module_state_dict()
        before = {name: value.clone() for name, value in before.items()}
        set_rate(engine, 0.01 if rank < world - 1 else 0.002)
        try:
            micro(engine, rank)
        finally:
            assert engine.global_steps == 1
            for name, value in engine.module_state_dict().items():
                assert torch.equal(value, before[name])
            set_rate(engine, 0.005)
            engine.step()
            assert engine.global_steps == 2 and engine.was_step_applied()

    first, other = r"0\.0(1|099\d+) in param group 0", r"0\.00(2|200\d+)"
    want = rf"ranks do not step alike: rank 0 has lr {first}, rank {world - 1} has lr {other}"
    assert all(re.search(want, text) for text in refusals(world, body))


def one_step_more(engine: Any) -> None:
    engine.step()


def another_batch(engine: Any) -> None:
    engine.set_train_batch_size(2 * engine.train_batch_size())


CALLS = {
    one_step_more: r"rank 0 has 0 calls of engine\.step\(\) without a backward before them, rank 1 has 1 calls",
    another_batch: r"rank 0 has gradient_accumulation_steps (\d), rank 1 has gradient_accumulation_steps",
}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_call_more_on_one_rank(call: Any, accumulation: int, stage: int) -> None:
    """Where every backward reduces, the first collective that not all ranks make says it."""

    def body(rank: int, group: tessera.Group) -> str:
        engine = tessera.Engine(make(), config(stage, accumulation=accumulation), group=group)
        for k in range(accumulation + 1):
            micro(engine, 10 * rank + k)
        if rank == 1:
            call(engine)
        for k in range(8):
            micro(engine, 100 + 10 * rank + k)
        return ""

    def run(rank: int, group: tessera.Group) -> str:
        try:
            return body(rank, group)
        except Exception as error:
            return str(error)

    start = time.monotonic()
    texts = run_ranks(2, run)
    assert time.monotonic() - start < 20
    for text in texts:
        assert re.search(CALLS[call] + r"|the ranks disagree.*same number of .* set_train_batch_size\(\)", text), text
    if stage < 2 or (stage == 2 and call is one_step_more and accumulation == 1):
        assert "ranks do not step alike" in texts[0]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("what", ["a boundary", "a step fewer", "a step fewer, past the engine"])
def test_another_number_of_micro_batches(what: str, stage: int) -> None:
    """Told at the first update; and once the ranks have begun alike again, they go on."""

    past = what.endswith("past the engine")

    def body(rank: int, group: tessera.Group) -> str:
        engine = tessera.Engine(make(), config(stage, accumulation=2), group=group)
        model = engine.module if past else engine
        micro(engine, rank)
        micro(engine, rank)
        before = {name: value.clone() for name, value in masters(engine).items()}
        try:
            for k in range(4):
                odd = rank == 1 and k == 0
                if odd and what == "a boundary":
                    engine.set_gradient_accumulation_boundary(True)
                model(*batch(10 * rank + k)).backward()
                if not odd or what == "a boundary":
                    engine.step()
        except Exception as error:
            if stage < 2:
                assert engine.global_steps == 1 and same_bits(masters(engine), before)
                if rank == 1 and what == "a boundary":
                    engine.set_gradient_accumulation_boundary(False)
                    engine.step()
                engine.zero_grad()
                micro(engine, rank)
                assert engine.global_steps == 2 and not same_bits(masters(engine), before)
            return str(error)
        return "silent"

    start = time.monotonic()
    texts = run_ranks(2, body)
    assert time.monotonic() - start < 20
    lines = {
        "a boundary": r"rank 0 has 2 calls of engine\.step\(\) in this update, rank 1 has 1 calls",
        "a step fewer": r"rank 0 has 0 micro-batches without a step\(\) of their own in this update, rank 1 has 1",
    }
    for text in texts:
        line = lines[what.split(",")[0]]
        assert re.search(line if stage < 2 else "the ranks disagree.*same number of|do not step alike", text), text


def loaded(engine: Any, scale: float) -> None:
    engine.loss_scaler.load_state_dict({**engine.loss_scaler.state_dict(), "loss_scale": scale})


SCALES: dict[str, Callable[[Any, float], None]] = {
    "optimizer": lambda engine, scale: setattr(engine.optimizer, "loss_scale", scale),
    "scaler": lambda engine, scale: setattr(engine.loss_scaler, "loss_scale", scale),
    "override": lambda engine, scale: engine.loss_scaler.override(scale),
    "load": loaded,
}


@pytest.mark.parametrize("way", SCALES)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_loss_scale(dynamic: bool, stage: int, way: str) -> None:
    """Set before a backward or after it; nothing is updated or counted, and the ranks go on once they are alike."""
    mode = {"initial_scale_power": 6} if dynamic else {"loss_scale": 64}

    def body(engine: Any, rank: int) -> None:
        def backward() -> None:
            engine.backward(engine(*batch(10 * rank)))

        backward()
        engine.step()
        before = masters(engine)
        for when in ("before", "after"):
            if when == "after":
                backward()
            SCALES[way](engine, 128.0 if rank else 64.0)
            if when == "before":
                backward()
            named = r"rank 0 has loss scale 64, rank 1 has loss scale 128"
            for meet in (engine.step, engine.grad_norm):
                with pytest.raises(ValueError, match=f"do not step alike: {named}"):
                    meet()
            SCALES[way](engine, 64.0)
            engine.zero_grad()
        assert engine.global_steps == 1 and same_bits(masters(engine), before)
        backward()
        engine.step()
        assert engine.was_step_applied() and not same_bits(masters(engine), before)

    engines(make(), 2, config(stage, fp16={"enabled": True} | mode), body)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("accumulation", [1, 2])
def test_clipping_by_hand(accumulation: int, stage: int) -> None:
    """To another norm on one rank, or to none that can be: refused on all with the gradients as they were."""

    def body(engine: Any, rank: int) -> None:
        for k in range(accumulation):
            engine(*batch(10 * rank + k)).backward()
            if k + 1 < accumulation:
                engine.step()
        norm = engine.grad_norm()
        with pytest.raises(
            ValueError, match=r"rank 0 has a call of engine\.clip_grad_norm_\(0\.02\), rank 1 has .*\(0\.01\)"
        ):
            engine.clip_grad_norm_(0.01 if rank else 0.02)
        with pytest.raises(ValueError, match="max_norm must be a number >= 0, got -1"):
            engine.clip_grad_norm_(-1 if rank else 0.02)
        with pytest.raises(NotImplementedError if rank else ValueError, match=r"norm_type 1\.0 is not served"):
            engine.clip_grad_norm_(0.02, norm_type=1.0 if rank else 2.0)
        assert engine.grad_norm() == norm
        assert engine.clip_grad_norm_(norm / 2).item() == pytest.approx(norm)
        assert engine.grad_norm() == pytest.approx(norm / 2, rel=1e-4)
        engine.step()
        assert engine.global_steps == 1

    engines(make(), 2, config(stage, accumulation), body)


@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("stage", range(3))
def test_numbers_of_backwards_that_may_differ(stage: int, managed: bool) -> None:
    """Rank 1 has one loss, the others, of one forward or of two in no_sync(), are rank 0's."""

    def losses(model: Any, rank: int) -> list[torch.Tensor]:
        both = [model(*batch(20 + k)) for k in range(2 - rank)]
        return [*both, 3 * both[0]] if rank == 0 else both

    def body(engine: Any, rank: int) -> dict[str, torch.Tensor]:
        *more, last = losses(engine, rank)
        with engine.no_sync() if managed or stage == 2 else contextlib.nullcontext():
            for loss in more:
                loss.backward(retain_graph=True)
        last.backward()
        engine.step()
        assert engine.global_steps == 1
        return masters(engine)

    def several(engine: Any, rank: int) -> dict[str, torch.Tensor]:
        """At a micro-batch that reduces nothing."""
        loss = engine(*batch(20))
        for k in range(2 - rank):
            ((3 - 2 * k) * loss).backward(retain_graph=True)
        engine.step()
        engine(*batch(21)).backward()
        engine.step()
        assert engine.global_steps == 1
        return masters(engine)

    def expected(terms: list[tuple[int, float]]) -> dict[str, torch.Tensor]:
        model = make()
        sum(factor * model(*batch(20 + k)) for k, factor in terms).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        return {name: value.detach() for name, value in model.named_parameters()}

    cfg = config(stage, managed_gradient_accumulation=managed)
    for values in engines(make(), 2, cfg, body):
        assert_close(values, expected([(0, (1 + 3 + 1) / 2), (1, 0.5)]))
    if stage < 2 and managed:
        for values in engines(make(), 2, config(stage, accumulation=2), several):
            assert_close(values, expected([(0, (3 + 1 + 3) / 4), (1, 0.5)]))


@pytest.mark.parametrize("stage", range(4))
def test_other_keys_of_a_client_s_optimizer(stage: int) -> None:
    """Those that it had from the start: what an optimizer adds is its own memory."""

    def body(rank: int, group: tessera.Group) -> None:
        model = make()
        own = torch.optim.RMSprop(model.parameters(), lr=0.01)
        engine = tessera.Engine(model, config(stage, zero_allow_untested_optimizer=True), optimizer=own, group=group)
        micro(engine, rank)
        engine.basic_optimizer.param_groups[0]["memory"] = rank
        micro(engine, rank)
        assert engine.global_steps == 2
        engine.basic_optimizer.param_groups[0]["alpha"] = 0.9 if rank == 1 else 0.99
        micro(engine, rank)

    text = refusals(2, body)[0]
    assert "rank 0 has alpha 0.99 in param group 0, rank 1 has alpha 0.9 in param group 0" in text


@pytest.mark.parametrize("stage", range(4))
def test_a_norm_that_one_rank_asks_for(stage: int) -> None:
    def body(rank: int, group: tessera.Group) -> None:
        engine = tessera.Engine(make(), config(stage), group=group)
        engine(*batch(rank)).backward()
        if rank == 1:
            engine.grad_norm()
        engine.step()

    text = refusals(2, body)[0]
    assert "rank 0 has a call of engine.step(), rank 1 has a call of engine.grad_norm()" in text


def test_the_schedule() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.1}}

    def body(rank: int, group: tessera.Group) -> None:
        own = {**schedule, "params": {**schedule["params"], "warmup_num_steps": 10 + rank}}
        tessera.Engine(make(), config(1, scheduler=own), group=group)

    text = refusals(2, body)[0]
    assert "rank 0 has scheduler WarmupLR" in text and '"warmup_num_steps": 11' in text


MESHES: dict[str, dict[str, Any]] = {
    "zero_optimization.mics_shard_size": {"zero": {"mics_shard_size": 1}},
    "sequence_parallel_size": {"sequence_parallel_size": 2},
    "tensor_parallel.autotp_size": {"tensor_parallel": {"autotp_size": 2}},
    "sequence_parallel_size, which does not divide": {"sequence_parallel_size": 3},
}


@pytest.mark.parametrize("key", MESHES)
def test_a_mesh(key: str) -> None:
    def body(rank: int, group: tessera.Group) -> None:
        cfg = config(3, **(MESHES[key] if rank == 1 else {}))
        tessera.Engine(make(), cfg, group=group)

    assert f"ranks ask for different meshes: rank 0 has {key.split(',')[0]}" in refusals(2, body)[0]


def mesh_of_processes(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    start = time.monotonic()
    for key in list(MESHES)[:3]:
        for build in (tessera.initialize, tessera.zero.Init):
            if build is tessera.zero.Init and "autotp" in key:
                continue  # it partitions over all ranks, before anything is cut
            cfg = config(3, **(MESHES[key] if rank == 1 else {}))
            with pytest.raises(ValueError, match=f"different meshes: rank 0 has {key}"):
                build(model=make(), config=cfg) if build is tessera.initialize else build(config=cfg)
    assert time.monotonic() - start < 20
    engine = tessera.initialize(model=make(), config=config(1))[0]
    micro(engine, rank)
    assert engine.global_steps == 1 and weights(engine.module)
    dist.destroy_process_group()


def test_a_mesh_of_processes() -> None:
    """Before any of them waits for the others in a group that they do not make."""
    run_processes(2, mesh_of_processes, free_port())
