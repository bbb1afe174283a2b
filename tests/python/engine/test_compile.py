"""engine.compile(): the results of the module as it is, in every stage, without a word of the compiler."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from support import batch, config, engines, make, run, weights

import tessera


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
