"""tessera.shared_parameters: one copy of the compute parameters for all ranks of a host. Ranks are processes where it
matters, threads where it does not."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import batch, config, engines, losses_of, make, run_processes, weights
from torch import nn

import tessera

WORLD = 2


def shared(stage: int, **more: Any) -> dict[str, Any]:
    section = {"shared_parameters": True, "min_unit_elements": 1}
    return config(stage, tessera=section, **more)


def private(stage: int, **more: Any) -> dict[str, Any]:
    return config(stage, tessera={"min_unit_elements": 1}, **more)


def steps_of(engine: tessera.Engine, rank: int, first: int = 0, steps: int = 3) -> list[float]:
    return losses_of(engine, rank, first, steps * engine.gradient_accumulation_steps())


def values_of(engine: tessera.Engine) -> list[torch.Tensor]:
    return list(weights(engine.module).values())


def random_values(params: Iterable[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        nn.init.normal_(param, std=0.3, generator=generator)


def life(engine: tessera.Engine, rank: int) -> tuple[list[float], list[torch.Tensor]]:
    """Training, evaluation, regions, a state dict and setters."""
    losses = steps_of(engine, rank)
    with torch.no_grad():
        losses.append(engine(*batch(99)).item())
    model: Any = engine.module
    with tessera.zero.GatheredParameters(model.parameters(), modifier_rank=1):
        random_values(model.parameters(), 7)  # without sharing, stages 1 and 2 take every rank's own values
    losses += steps_of(engine, rank, 10)
    state = engine.module_state_dict()
    engine.load_module_state_dict({name: value * 0.5 for name, value in state.items()})
    tessera.state.set_full_fp32_param(engine, model.head.weight, torch.full((3, 7), 0.25))
    mine = tessera.state.get_local_fp32_param(engine, model.embed.weight)
    assert mine is not None
    tessera.state.set_local_fp32_param(engine, model.embed.weight, torch.full_like(mine, 0.125))
    losses += steps_of(engine, rank, 20)
    return losses, values_of(engine)


CASES = [(stage, more) for stage in (1, 2, 3) for more in ({}, {"bf16": True}, {"accumulation": 2})]


@pytest.mark.parametrize(("stage", "more"), CASES)
def test_the_bits_of_private_parameters(stage: int, more: dict[str, Any]) -> None:
    for world in (2, 3):
        apart = engines(make(), world, private(stage, **more), life)
        same = engines(make(), world, shared(stage, **more), life)
        for (losses, values), (other_losses, other_values) in zip(apart, same, strict=True):
            assert losses == other_losses
            assert all(torch.equal(a, b) for a, b in zip(values, other_values, strict=True))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_torch_autocast(stage: int) -> None:
    more = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    apart = engines(make(), 2, private(stage, **more), life)
    same = engines(make(), 2, shared(stage, **more), life)
    assert [losses for losses, _ in apart] == [losses for losses, _ in same]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_client_optimizer(stage: int) -> None:
    def body(engine: tessera.Engine, rank: int) -> tuple[list[float], list[torch.Tensor]]:
        return steps_of(engine, rank), values_of(engine)

    results = []
    for cfg in (private(stage), shared(stage)):
        cfg |= {"zero_allow_untested_optimizer": True}
        cfg["optimizer"] = {"type": "Rprop", "params": {"lr": 0.01}}
        results.append(engines(make(), 2, cfg, body))
    for (losses, values), (other_losses, other_values) in zip(*results, strict=True):
        assert losses == other_losses
        assert all(torch.equal(a, b) for a, b in zip(values, other_values, strict=True))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_ranks_writes_hold(stage: int) -> None:
    def body(engine: tessera.Engine, rank: int) -> list[torch.Tensor]:
        steps_of(engine, rank)
        params = list(engine.module.parameters())
        with tessera.zero.GatheredParameters(params, modifier_rank=1):
            random_values(params, rank)
        return values_of(engine)

    want = make()
    random_values(want.parameters(), 1)
    for values in engines(make(), 3, shared(stage), body):
        assert all(torch.equal(a, b) for a, b in zip(values, want.parameters(), strict=True))


def test_evaluation_needs_no_company() -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        with torch.no_grad():
            for i in range(3 * rank):
                engine(*batch(i))
        steps_of(engine, rank)

    engines(make(), 3, shared(3), body)


def test_alone_and_in_stage_0_nothing_is_shared() -> None:
    engine, *_ = tessera.initialize(model=make(), config=shared(3))
    steps_of(engine, 0)
    assert engine.core.memory().shared == 0
    assert engine.core.memory().params > 0

    def body(engine: tessera.Engine, rank: int) -> int:
        steps_of(engine, rank)
        return engine.core.memory().shared

    assert engines(make(), 2, shared(0), body) == [0, 0]


# ---- processes


def start(rank: int, port: int, transport: str) -> None:
    torch.set_num_threads(1)
    os.environ["TESSERA_TRANSPORT"] = transport
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)


def spawn(body: Any, *args: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_processes(WORLD, body, store.port, *args)


def segments() -> list[str]:
    """Open files and mappings of this process that are shared memory of Tessera's."""
    with open("/proc/self/maps") as maps:
        found = [line for line in maps if "memfd:tessera" in line]
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.islink(path) and "memfd:tessera" in os.readlink(path):
            found.append(path)
    return found


def pss() -> int:
    with open("/proc/self/smaps_rollup") as rollup:
        return next(1024 * int(line.split()[1]) for line in rollup if line.startswith("Pss_Shmem:"))


def real_ranks(rank: int, port: int) -> None:
    start(rank, port, "auto")
    for stage in (1, 2, 3):
        outcomes = []
        for cfg in (private(stage, bf16=True), shared(stage, bf16=True)):
            engine, *_ = tessera.initialize(model=make(), config=cfg)
            outcomes.append(life(engine, rank))
            engine.destroy()
        assert outcomes[0][0] == outcomes[1][0]
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0][1], outcomes[1][1], strict=True))
    the_end_frees_and_parts(rank)
    one_copy_for_all(rank)
    dist.barrier()
    dist.destroy_process_group()


def the_end_frees_and_parts(rank: int) -> None:
    """After destroy() and after garbage collection: values stay, ranks go their own ways, nothing stays mapped."""
    dist.barrier()
    before = len(segments())
    for by_hand in (True, False):
        model = make()
        engine, *_ = tessera.initialize(model=model, config=shared(2))
        steps_of(engine, rank)
        assert len(segments()) > before
        values = values_of(engine)
        dist.barrier()
        if by_hand:
            engine.destroy()
        del engine
        gc.collect()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), values, strict=True))
        dist.barrier()
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(rank)
        dist.barrier()
        assert all(bool((param == rank).all()) for param in model.parameters())
        twin = copy.deepcopy(model)
        nn.functional.mse_loss(twin(batch(0)[0]), batch(0)[1]).backward()
        assert len(segments()) <= before
    dist.barrier()


def one_copy_for_all(rank: int) -> None:
    wide = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16)))
    size = sum(param.numel() for param in wide.parameters()) * 4
    for stage in (1, 3):
        dist.barrier()
        before = pss()
        engine, *_ = tessera.initialize(model=copy.deepcopy(wide), config=shared(stage))
        engine(torch.randn(2, 512)).sum().backward()
        dist.barrier()
        grown = pss() - before
        dist.barrier()
        assert engine.core.memory().params == 0
        assert size <= engine.core.memory().shared <= 1.01 * size
        assert 0.4 * size < grown < 0.75 * size + (4 << 20), "half of what both have, and rings"
        engine.destroy()


def test_real_ranks() -> None:
    spawn(real_ranks)


def over_gloo(rank: int, port: int) -> None:
    start(rank, port, "gloo")
    for stage in (1, 3):
        with pytest.raises(ValueError, match=r"tessera.shared_parameters needs the 2 ranks .* on one host") as error:
            tessera.initialize(model=make(), config=shared(stage))
        assert "TESSERA_TRANSPORT" in str(error.value)
    engine, *_ = tessera.initialize(model=make(), config=shared(0))
    steps_of(engine, rank)
    dist.destroy_process_group()


def test_ranks_that_cannot_share_are_an_error_on_all() -> None:
    spawn(over_gloo)
