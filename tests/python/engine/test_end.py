"""What an engine's end leaves to the client: its optimizer's states, whole or refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    OPTIMIZERS,
    PAIR_SPECS,
    Pair,
    assert_close,
    batch,
    config,
    make,
    run_mesh,
    run_processes,
    run_ranks,
    shard_group,
    weights,
)
from tessera.errors import ConfigError, UsageError
from torch._subclasses.fake_tensor import FakeTensorMode

import tessera
from tessera.optim import Lamb
from tessera.zero import GatheredParameters

CLIENTS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {**OPTIMIZERS, "lamb": lambda p: Lamb(p, lr=0.01)}


def settings(stage: int, **zero: Any) -> dict[str, Any]:
    return config(stage, zero_allow_untested_optimizer=True, zero=zero)


def train(engine: Any, rank: int, first: int, steps: int = 2) -> None:
    for step in range(first, first + steps):
        engine(*batch(10 * rank + step)).backward()
        engine.step()


def train_plain(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ranks: int, first: int) -> None:
    for step in range(first, first + 2):
        for rank in range(ranks):
            (model(*batch(10 * rank + step)) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain(name: str, ranks: int = 2, steps: int = 4) -> dict[str, torch.Tensor]:
    model = make()
    optimizer = CLIENTS[name](model.parameters())
    for first in range(0, steps, 2):
        train_plain(model, optimizer, ranks, first)
    return dict(weights(model))


def over(stage: int, world: int, name: str, body: Callable[..., Any], **zero: Any) -> list[Any]:
    """body(engine, rank, model, optimizer), after two steps."""
    models = [copy.deepcopy(make()) for _ in range(world)]

    def run(rank: int, group: Any) -> Any:
        optimizer = CLIENTS[name](models[rank].parameters())
        engine = tessera.Engine(models[rank], settings(stage, **zero), optimizer=optimizer, group=group)
        train(engine, rank, 0)
        return body(engine, rank, models[rank], optimizer)

    return run_ranks(world, run)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", CLIENTS)
def test_states_are_whole_where_the_engine_ends_in_a_region(name: str, stage: int, world: int) -> None:
    """torch goes on as if there had been no engine."""
    want = plain(name, world)

    def body(engine: Any, rank: int, model: Any, optimizer: Any) -> None:
        with GatheredParameters(model.parameters()):
            engine.destroy()
        train_plain(model, optimizer, world, 2)
        assert_close(weights(model), want)

    over(stage, world, name, body)


@pytest.mark.parametrize("to", range(4))
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["adamw", "adamax", "lamb"])
def test_an_engine_of_any_stage_goes_on_with_whole_states(name: str, stage: int, to: int) -> None:
    want = plain(name)

    def body(engine: Any, rank: int, model: Any, optimizer: Any) -> None:
        mesh = engine.core.mesh()
        with GatheredParameters(model.parameters()):
            engine.destroy()
        other = tessera.Engine(model, settings(to), optimizer=optimizer, group=mesh)
        train(other, rank, 2)
        assert_close(weights(model), want)
        other.destroy()

    over(stage, 2, name, body)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", ["adamw", "momentum", "adamax", "lamb"])
def test_parts_are_refused_by_torch_and_taken_by_an_engine_of_the_same_cut(name: str, stage: int) -> None:
    want = plain(name)

    def body(engine: Any, rank: int, model: Any, optimizer: Any) -> None:
        group = shard_group(engine)
        engine.destroy()
        if stage > 0:
            with pytest.raises(UsageError, match=r"only the part .* inside zero\.GatheredParameters"):
                optimizer.step()
        if stage < 3:  # whose parameters are parts as well
            other = tessera.Engine(model, settings(stage), optimizer=optimizer, group=group)
            train(other, rank, 2)
            assert_close(weights(model), want)
            other.destroy()

    over(stage, 2, name, body)


@pytest.mark.parametrize("name", ["adamw", "adamax"])
def test_parts_of_another_cut_are_refused_on_all_ranks(name: str) -> None:
    def body(engine: Any, rank: int, model: Any, optimizer: Any) -> None:
        group = shard_group(engine)
        engine.destroy()
        for stage, own in ((0, group), (1, tessera.single_group())):
            with pytest.raises((ConfigError, OSError), match=r"are a part, elements|another rank could not take"):
                tessera.Engine(model, settings(stage), optimizer=optimizer, group=own)
        optimizer.state.clear()
        tessera.Engine(model, settings(0), optimizer=optimizer, group=group).destroy()

    over(2, 2, name, body)


@pytest.mark.parametrize("world", [1, 2])
def test_offloaded_states_end_with_the_engine_but_in_a_region(world: int, tmp_path: Path) -> None:
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}

    def body(engine: Any, rank: int, model: Any, optimizer: Any) -> None:
        group = shard_group(engine)
        engine.destroy()
        with pytest.raises(UsageError, match="only the part"):
            optimizer.step()
        # Threads share what catches warnings.
        told = pytest.warns(UserWarning, match="ended with it") if world == 1 else contextlib.nullcontext()
        with told:
            other = tessera.Engine(model, settings(1, **offload), optimizer=optimizer, group=group)
        train(other, rank, 2)
        with GatheredParameters(model.parameters()):
            other.destroy()
        train_plain(model, optimizer, world, 4)

    over(1, world, "adamw", body, **offload)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", ["adamw", "adamax"])
def test_slices_of_a_model_go_on_in_an_engine_of_the_same_mesh(name: str, stage: int, dp: int) -> None:
    """Tensor parallelism: the module stays cut."""
    cfg = settings(stage) | {"tensor_parallel": {"autotp_size": 2, "partition_config": PAIR_SPECS}}
    first, second = ([copy.deepcopy(make(Pair)) for _ in range(2 * dp)] for _ in range(2))

    def train_pair(engine: Any, rank: int, steps: int) -> None:
        for _ in range(steps):
            engine(torch.full((4, 6), 1.0 + rank // 2)).backward()
            engine.step()

    def body(rank: int, mesh: Any) -> None:
        through = tessera.Engine(first[rank], cfg, optimizer=CLIENTS[name](first[rank].parameters()), group=mesh)
        train_pair(through, rank, 4)
        model, optimizer = second[rank], CLIENTS[name](second[rank].parameters())
        engine = tessera.Engine(model, cfg, optimizer=optimizer, group=mesh)
        train_pair(engine, rank, 2)
        with GatheredParameters(model.parameters()):
            engine.destroy()
        engine = tessera.Engine(model, cfg, optimizer=optimizer, group=mesh)
        train_pair(engine, rank, 2)
        assert_close(weights(model), weights(first[rank]))
        for one in (through, engine):
            one.destroy()

    run_mesh(body, dp=dp, tp=2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("collected", [False, True])
def test_an_end_amid_a_trace_leaves_values(stage: int, collected: bool) -> None:
    """The garbage collector ends engines, and models of zero.Init, wherever torch traces (tensors without memory)."""
    model = make()
    engine = tessera.Engine(model, config(stage))
    train(engine, 0, 0)
    expected = [param.detach().clone() for param in model.parameters()]
    with FakeTensorMode():
        if collected:
            del engine
            gc.collect()
        else:
            engine.destroy()
    assert all(map(torch.equal, model.parameters(), expected))
    with tessera.zero.Init():
        early = torch.nn.Linear(4, 3)
    with FakeTensorMode():
        del early
        gc.collect()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_ends_with_its_last_user(stage: int) -> None:
    """Its parts do not keep it: the hooks go at once, not when the collector comes by."""
    model = make()
    engine = tessera.Engine(model, config(stage))
    train(engine, 0, 1)
    ended = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert ended() is None and not model._forward_pre_hooks
    finally:
        gc.enable()


def _end_engines_amid_collections(_: int) -> None:
    """Python's collector looks at every parameter and its hooks, again and again, while engines begin and end."""
    model = torch.nn.ParameterList([torch.zeros(2) for _ in range(400)])
    tessera.Engine(model, config(0), group=tessera.thread_groups(1)[0]).destroy()
    gc.collect()
    gc.freeze()
    model, over = torch.nn.ParameterList([torch.zeros(2) for _ in range(400)]), threading.Event()

    def collect() -> None:
        while not over.is_set():
            gc.collect()

    collector = threading.Thread(target=collect)
    collector.start()
    sys.setswitchinterval(1e-5)
    for _ in range(20):
        tessera.Engine(model, config(0), group=tessera.thread_groups(1)[0]).destroy()
    over.set()
    collector.join()


def test_an_engine_begins_and_ends_amid_garbage_collections() -> None:
    run_processes(1, _end_engines_amid_collections)
