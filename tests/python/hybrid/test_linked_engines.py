"""Two engines of different meshes over a link train as the two models in one process do."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from link_ranks import split
from support import config, make, run_mesh
from tessera.hybrid import Layout, Link
from torch import nn

import tessera

ROWS, TOKENS, STEPS, MICRO = 4, 6, 3, 2


class Vision(nn.Module):
    """Token by token, so that it does not mind whose they are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 9)
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(2))
        self.out = nn.Linear(9, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.to(self.embed.weight.dtype))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.out(x)


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.down(torch.tanh(self.up(x.to(self.up.weight.dtype))))
        return ((out.float() - y) ** 2).mean()


def data(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + micro)
    return torch.randn(ROWS, TOKENS, 5, generator=generator), torch.randn(ROWS, TOKENS, 3, generator=generator)


def plain_weights(vision: nn.Module, text: nn.Module, clip: float = 0.0) -> list[torch.Tensor]:
    vision, text = copy.deepcopy(vision), copy.deepcopy(text)
    optimizer = torch.optim.SGD([*vision.parameters(), *text.parameters()], lr=0.1)
    for step in range(STEPS):
        for micro in range(MICRO):
            x, y = data(step, micro)
            (text(vision(x), y) / MICRO).backward()
        if clip > 0:
            torch.nn.utils.clip_grad_norm_([*vision.parameters(), *text.parameters()], clip)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in [*vision.parameters(), *text.parameters()]]


def vision_rank(link, store, model, stage, mesh, rank, **more):
    engine = tessera.Engine(model, config(stage, MICRO, **more), group=mesh)
    with link.sender(store, rank, engine) as sender:
        for step in range(STEPS):
            for micro in range(MICRO):
                x = split(data(step, micro)[0], link.source, rank, 0, 1)
                sender.send(engine(x), (step, micro))
            for micro in reversed(range(MICRO)):
                sender.backward((step, micro))
                engine.step()
            sender.step()
    state = engine.module_state_dict()
    engine.destroy()
    return state


def text_rank(link, store, model, stage, mesh, rank, **more):
    engine = tessera.Engine(model, config(stage, MICRO, **more), group=mesh)
    with link.receiver(store, rank, engine) as receiver:
        for step in range(STEPS):
            for micro in range(MICRO):
                x = receiver.receive((step, micro))
                engine.backward(engine(x, split(data(step, micro)[1], link.target, rank, 0, 1)))
                receiver.give_back((step, micro))
                engine.step()
            receiver.step()
    state = engine.module_state_dict()
    engine.destroy()
    return state


TP = {
    "tensor_parallel": {
        "autotp_size": 2,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": ["up\\.weight$"], "partition_type": "column"},
                {"patterns": ["down\\.weight$"], "partition_type": "row"},
            ],
        },
    }
}
PAIRS = {
    "sp2 to tp2": (Layout(sequence=2), Layout(replicas=2)),
    "sp3 to 1": (Layout(sequence=3), Layout()),
    "1 to dp2": (Layout(), Layout(batch=2)),
    "dp2 sp2 to tp2": (Layout(batch=2, sequence=2), Layout(replicas=2)),
    "dp2 to sp2": (Layout(batch=2), Layout(sequence=2)),
}


def trained(pair: str, stage: int, vision: nn.Module, text: nn.Module, **more) -> list[torch.Tensor]:
    """Weights after STEPS steps on ranks that are threads."""
    link = Link("vision", *PAIRS[pair], 0, 1, sides=("vision", "text"), timeout=60)
    store = dist.HashStore()
    copying = threading.Lock()

    def side(layout, model, body, extra):
        def on_rank(rank, mesh):
            with copying:
                mine = copy.deepcopy(model)
            return body(link, store, mine, stage, mesh, rank, **more, **extra)

        return run_mesh(on_rank, layout.batch, layout.sequence, layout.replicas)

    extra = TP if link.target.replicas > 1 else {}
    with ThreadPoolExecutor(2) as pool:
        sides = [
            pool.submit(side, link.source, vision, vision_rank, {}),
            pool.submit(side, link.target, text, text_rank, extra),
        ]
        states = [future.result()[0] for future in sides]
    return [value for state in states for value in state.values()]


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("pair", PAIRS)
def test_weights_of_one_process(pair, stage):
    vision, text = make(Vision, seed=1), make(Text, seed=2)
    found = trained(pair, stage, vision, text)
    # fp32; sums over ranks are in another order than the sums over a whole batch.
    for actual, expected in zip(found, plain_weights(vision, text), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtypes", [("bf16", "bf16"), ("bf16", "fp16"), ("fp16", "bf16"), ("fp16", "fp16")], ids=str)
def test_engines_of_other_dtypes(dtypes):
    """Each engine's loss scale stays its own."""
    vision, text = make(Vision, seed=1), make(Text, seed=2)
    link = Link("vision", sides=("vision", "text"), timeout=60)
    store = dist.HashStore()
    modes = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}
    with ThreadPoolExecutor(2) as pool:
        bodies = [(vision_rank, vision, dtypes[0]), (text_rank, text, dtypes[1])]
        futures = [
            pool.submit(body, link, store, copy.deepcopy(model), 1, tessera.single_group(), 0, **modes[dtype])
            for body, model, dtype in bodies
        ]
        found = [value for future in futures for value in future.result().values()]
    for actual, expected in zip(found, plain_weights(vision, text), strict=True):
        torch.testing.assert_close(actual.float(), expected, rtol=0.02, atol=0.01)  # bf16 keeps 8 bits


def test_an_end_may_be_the_last_that_holds_its_engine():
    link, store = Link("vision", timeout=60), dist.HashStore()
    engine = tessera.Engine(make(Text, seed=2), config(1, 1), group=tessera.single_group())
    sender, receiver = link.sender(store, 0), link.receiver(store, 0, engine)
    sender.send(torch.ones(2), 0)
    receiver.receive(0)
    core = weakref.ref(engine)
    del engine
    gc.collect()
    assert core() is None
    del receiver
