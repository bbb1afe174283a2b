"""engine.compile(): the results of the module as it is, in every stage, without a word of the compiler."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from support import Net, batch, config, engines, make, run, weights
from torch._dynamo.backends.common import aot_autograd

import tessera


def replaying(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
    """A compiler of backwards whose results lie where those of the call before lay, as those of CUDA graphs do."""
    memory: dict[tuple[int, int], bytearray] = {}

    def place(number: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.numel() == 0:
            return value
        there = memory.setdefault((threading.get_ident(), number), bytearray(value.nbytes))
        return torch.frombuffer(there, dtype=value.dtype).resize_(value.shape).copy_(value)

    return make_boxed_func(lambda *args: [place(number, value) for number, value in enumerate(graph(*args))])


@pytest.mark.usefixtures("threads_compile")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_in_memory_of_a_graph_are_accumulated(stage: int, world: int) -> None:
    torch._dynamo.reset()
    whole = {"stage3_param_persistence_threshold": 10**6} if stage == 3 else {}  # else gathers bring weights elsewhere
    compiler = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=replaying)

    def body(engine: tessera.Engine, rank: int, compiled: bool) -> dict[str, torch.Tensor | None]:
        for block in engine.module.blocks if compiled else ():
            block.compile(backend=compiler)
        run(engine, rank, 6)
        return weights(engine.module)

    results = [
        engines(
            make(Net, 192),
            world,
            config(stage, accumulation=3, zero=whole),
            lambda engine, rank, c=c: body(engine, rank, c),
        )
        for c in (False, True)
    ]
    for name, value in results[0][0].items():
        assert value is not None and torch.equal(results[1][0][name], value), name


@pytest.mark.usefixtures("threads_compile")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_compiled_module_trains_as_the_plain_one(
    stage: int, world: int, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    model = make()

    def body(engine: tessera.Engine, rank: int, compiled: bool) -> dict[str, torch.Tensor | None]:
        assert not engine.is_compiled
        if compiled:
            engine.compile(backend=backend)
            engine.compile(backend=backend)
            assert engine.is_compiled
        run(engine, rank, 3)
        return weights(engine.module)

    expected = engines(model, world, config(stage), lambda engine, rank: body(engine, rank, False))
    with caplog.at_level(logging.WARNING):
        found = engines(model, world, config(stage), lambda engine, rank: body(engine, rank, True))
    assert not [
        record for record in caplog.records if "torch._dynamo" in record.name
    ]  # as of a limit of recompilations
    for name, value in expected[0].items():
        assert value is not None and found[0][name] is not None and torch.equal(found[0][name], value), name


@pytest.mark.parametrize("stage", [1, 3])
def test_a_destroyed_engine_leaves_a_module_that_runs(stage: int) -> None:
    torch._dynamo.reset()
    model = make()
    x, y = batch(0)
    expected = copy.deepcopy(model)(x, y)
    engine, *_ = tessera.initialize(model=model, config=config(stage))
    engine.compile(backend="eager")
    assert torch.equal(engine(x, y), expected)
    engine.destroy()
    assert torch.equal(model(x, y), expected)


def test_arguments_that_nobody_reads_are_refused() -> None:
    engine = tessera.Engine(make(), config())
    with pytest.raises(TypeError, match="fullgraph"):
        engine.compile(fullgraph=True)  # type: ignore[call-arg]
    engine.destroy()
