"""torch.func and forward AD over an engine: the values of plain PyTorch, and training goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import assert_close, batch, config, engines, free_port, make, run, run_processes, weights
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

import tessera

X, Y = batch(0)


def dual(m: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(m(forward_ad.make_dual(X, torch.ones_like(X)), Y)).tangent


def of_parameters(m: Any) -> Any:
    module = getattr(m, "module", m)
    return grad(lambda params: functional_call(module, params, (X, Y)))(dict(module.named_parameters()))


def later(m: Any) -> Any:
    """The graph outlives the transformation, and other forwards."""
    out, back = vjp(lambda x: m(x), X)
    m(Y @ torch.ones(3, 5))
    return back(torch.ones_like(out))


REVERSE: dict[str, Callable[[Any], Any]] = {
    "grad": lambda m: grad(lambda x: m(x, Y))(X),
    "grad of grad": lambda m: grad(lambda x: grad(lambda u: m(u, Y))(x).pow(2).sum())(X),
    "jacrev": lambda m: jacrev(lambda x: m(x))(X),
    "jacrev of jacrev": lambda m: jacrev(jacrev(lambda x: m(x, Y)))(X),
    "vmap": lambda m: vmap(lambda row: m(row))(X),
    "vmap of grad": lambda m: vmap(grad(lambda row: m(row).sum()))(X),
    "vjp": later,
    "of parameters": of_parameters,
}
FORWARD: dict[str, Callable[[Any], Any]] = {  # what torch keeps of it is the process's, not a thread's
    "jvp": lambda m: jvp(lambda x: m(x, Y), (X,), (torch.ones_like(X),)),
    "jacfwd": lambda m: jacfwd(lambda x: m(x))(X),
    "hessian": lambda m: hessian(lambda x: m(x, Y))(X),
    "forward AD": dual,
    "jacobian": lambda m: torch.autograd.functional.jacobian(lambda x: m(x, Y), X, vectorize=True),
}


def compare(engine: Any, rank: int, way: Callable[[Any], Any], plain: Any, trained: Any) -> None:
    before = weights(engine.module)
    for _ in range(2):
        torch.testing.assert_close(way(engine), way(plain))
    assert not engine.core.has_gradients()
    assert_close(weights(engine.module), before)
    run(engine, rank, 2)
    trained.load_state_dict(weights(engine.module))
    torch.testing.assert_close(way(engine), way(trained))


@pytest.mark.parametrize("name", REVERSE)
@pytest.mark.parametrize("stage", range(4))
def test_values_are_those_of_plain_torch(stage: int, name: str) -> None:
    plain = [(make(), make()) for _ in range(2)]
    for unit in (1, 1 << 20):
        cfg = config(stage, tessera={"min_unit_elements": unit})
        engines(make(), 2, cfg, lambda engine, rank: compare(engine, rank, REVERSE[name], *plain[rank]))


def train(engine: Any, rank: int, way: Callable[[Any], Any], plain: Any) -> None:
    """The loss is made of what `way` returns, and is differentiated backwards."""
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for model in (engine, plain):
            sum(value.square().mean() for value in tree_leaves(way(model))).backward()
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(weights(engine.module), plain.state_dict())


@pytest.mark.parametrize("unit", [1, 1 << 20])
@pytest.mark.parametrize("name", [name for name in REVERSE if name != "of parameters"])
@pytest.mark.parametrize("stage", range(4))
def test_trained_through(stage: int, name: str, unit: int) -> None:
    plain = [make() for _ in range(2)]  # not by the threads: they share torch's generator
    cfg = config(stage, tessera={"min_unit_elements": unit})
    engines(make(), 2, cfg, lambda engine, rank: train(engine, rank, REVERSE[name], plain[rank]))


def forwards(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for stage in (1, 3):
        for name, way in FORWARD.items():
            cfg = config(stage, tessera={"min_unit_elements": 1})
            engine = tessera.initialize(model=make(), config=cfg)[0]
            compare(engine, rank, way, make(), make())
            engine.destroy()
            if name != "jacobian":  # without create_graph
                engine = tessera.initialize(model=make(), config=cfg)[0]
                train(engine, rank, way, make())
                engine.destroy()


def test_forward_mode() -> None:
    run_processes(2, forwards, free_port())
