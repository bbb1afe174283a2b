"""Stage 3: which parameters are whole when, in ordinary and unusual models."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import (
    Block,
    Net,
    assert_close,
    batch,
    config,
    engines,
    full_grads,
    gathered,
    make,
    mse,
    one_backward,
    plain_grads,
    same_gradients,
    shard_group,
    weights,
)
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import tessera


def none_is_whole(engine: tessera.Engine, rank: int) -> None:
    assert gathered(engine) == []


def test_parameters_are_whole_only_in_their_modules() -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        seen: list[list[str]] = []
        for block in engine.module.blocks:
            block.linear.register_forward_hook(lambda *_: seen.append(gathered(engine)))
        for step in range(3):
            engine(*batch(rank + step)).backward()
            assert gathered(engine) == []
            engine.step()
            assert gathered(engine) == []
        with torch.no_grad():
            for _ in range(2):
                engine(batch(rank)[0])
        assert gathered(engine) == []
        for names in seen:
            assert {name.split(".")[1] for name in names if name.startswith("blocks")} in ({"0"}, {"1"})

    engines(make(), 2, config(3, zero={"stage3_prefetch_bucket_size": 0}, tessera={"min_unit_elements": 1}), body)


def test_small_parameters_stay() -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        assert set(gathered(engine)) == {name for name, param in engine.module.named_parameters() if param.numel() <= 7}
        engine(*batch(rank)).backward()
        engine.step()

    engines(make(), 2, config(3, zero={"stage3_param_persistence_threshold": 7}), body)


class Tied(nn.Module):
    """The head is the transposed embedding, used by the model itself; the bias comes from a child."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 6, bias=False)
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.bias = Bias()
        self.out = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x.to(self.embed.weight.dtype))
        for block in self.blocks:
            hidden = block(hidden)
        return mse(self.out(hidden @ self.embed.weight + self.bias()), y)


class Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.linspace(-1, 1, 5))

    def forward(self) -> torch.Tensor:
        return self.value


@pytest.mark.parametrize("accumulation", [1, 2])
def test_parameters_of_other_modules_are_gathered_with_their_user(accumulation: int) -> None:
    def pattern(m: Any, rank: int) -> None:
        for k in range(2):
            m(*batch(rank + k)).backward()

    same_gradients(make(Tied), 2, config(3, accumulation), pattern, then=none_is_whole, scale=1 / accumulation)


def test_registered_external_parameters() -> None:
    class Reader(nn.Module):
        def __init__(self, source: nn.Linear) -> None:
            super().__init__()
            self.hidden = [source]  # not a submodule

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.hidden[0]._parameters.get("weight")  # passes by every hook

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 3)
            self.reader = Reader(self.first)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return mse(self.reader(self.first(x)) @ torch.ones(5, 3), y)

    model = make(Model)

    def body(engine: tessera.Engine, rank: int) -> None:
        module = engine.module
        with pytest.raises(RuntimeError, match="register_external_parameter"):
            engine(*batch(rank))
        assert gathered(engine) == []
        tessera.zero.register_external_parameter(module.reader, module.first.weight)
        engine(*batch(rank)).backward()

    same_gradients(model, 2, config(3), body, one_backward)
    with pytest.raises(tessera.UsageError, match="Parameter"):
        tessera.zero.register_external_parameter(model.reader, torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(tessera.UsageError, match="not registered"):
        tessera.zero.unregister_external_parameter(model.reader, model.first.bias)


def test_lora_style_frozen_weights() -> None:
    """Frozen weights are partitioned too, and released after every backward, with and without checkpointing."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = Block(7)
            self.base.requires_grad_(False)
            self.down, self.up = nn.Linear(7, 2, bias=False), nn.Linear(2, 7, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(5, 7).requires_grad_(False)
            self.layers = nn.ModuleList(Adapted() for _ in range(3))
            self.mode = 0

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            hidden = self.embed(x)
            for layer in self.layers:
                if self.mode:
                    hidden = checkpoint(layer, hidden.requires_grad_(), use_reentrant=self.mode == 2)
                else:
                    hidden = layer(hidden)
            return mse(hidden[:, :3], y)

    model = make(Model)
    for mode in range(3):
        model.mode = mode

        def body(engine: tessera.Engine, rank: int) -> None:
            for _ in range(2):
                engine(*batch(rank)).backward()
                assert gathered(engine) == []
            assert engine.core.memory().states < 4 * 3 * 28 * 8

        def pattern(m: nn.Module, rank: int) -> None:
            for _ in range(2):
                m(*batch(rank)).backward()

        same_gradients(model, 2, config(3, optimizer={"type": "AdamW", "params": {"lr": 0.01}}), body, pattern)


@pytest.mark.parametrize("early_stop", [False, True])
def test_a_recomputation_that_fails_leaves_nothing_behind(early_stop: bool) -> None:
    class Shaky(Block):
        fail = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.linear(self.norm(x))
            if Shaky.fail and torch._C._current_graph_task_id() != -1:
                raise RuntimeError("recompute failed")
            return x + torch.tanh(hidden)

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Shaky(7) for _ in range(2))

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    def body(engine: tessera.Engine, rank: int) -> None:
        with set_checkpoint_early_stop(early_stop):
            Shaky.fail = True
            loss = engine(*batch(rank))
            with pytest.raises(RuntimeError, match="recompute failed"):
                loss.backward()
            assert gathered(engine) == []
            engine.zero_grad()
            shard_group(engine).barrier()
            Shaky.fail = False
            shard_group(engine).barrier()
            engine(*batch(rank)).backward()

    same_gradients(make(Model), 2, config(3), body, one_backward, none_is_whole)


class Stop(KeyboardInterrupt):  # torch runs a module's hooks for Exceptions only
    pass


def test_a_child_that_stops_past_its_hooks_does_not_unwatch_its_parent() -> None:
    class Child(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise Stop

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7, 7))
            self.child = Child(7, 7)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x) @ self.weight
            with contextlib.suppress(Stop):
                self.child(x)
            return torch.tanh(x @ self.weight)

    same_gradients(make(Model), 2, config(3, tessera={"min_unit_elements": 1}), then=none_is_whole)


INTERRUPTED: dict[str, Any] = {
    "engine": lambda engine, rank: engine(*batch(rank)),
    "module": lambda engine, rank: engine.module(*batch(rank)),
    "block": lambda engine, rank: engine.module.blocks[0](torch.ones(4, 7)),
    "recomputation": lambda engine, rank: checkpoint(
        engine.module.blocks[0], torch.ones(4, 7).requires_grad_(), use_reentrant=False
    ),
}


@pytest.mark.parametrize("way", INTERRUPTED)
@pytest.mark.parametrize("then", ["forward", "step", "child"])
@pytest.mark.parametrize("min_unit", [1, 1 << 20])
def test_an_interrupted_forward_leaves_nothing_behind(way: str, then: str, min_unit: int) -> None:
    class Shaky(Block):
        interrupted = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.linear(self.norm(x))
            if self.interrupted and (way != "recomputation" or torch._C._current_graph_task_id() != -1):
                raise Stop
            return x + torch.tanh(hidden)

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Shaky(7) for _ in range(2))

    def body(engine: tessera.Engine, rank: int) -> None:
        block = engine.module.blocks[0]
        block.interrupted = True
        with pytest.raises(Stop), tessera.zero.GatheredParameters(engine.module.head.parameters()):
            INTERRUPTED[way](engine, rank).sum().backward()
        block.interrupted = False
        with tessera.zero.GatheredParameters(engine.module.parameters()):
            engine.module.head.weight.sum()
        engine.zero_grad()
        if then == "step":
            with pytest.raises(tessera.UsageError, match="would train nothing"):
                engine.step()
        elif then == "child":  # of one that was interrupted
            block.linear(torch.ones(2, 7)).sum().backward()
            engine.zero_grad()
        engine(*batch(rank)).backward()

    def then_a_child(engine: tessera.Engine, rank: int) -> None:
        block = engine.module.blocks[0]
        assert gathered(engine) == [] and not engine.core.inside_module()
        engine.zero_grad()
        block.linear(torch.ones(2, 7)).sum().backward()
        with pytest.raises(RuntimeError, match="is partitioned"):
            block.linear.weight.sum()
        engine.step()

    cfg = config(3, tessera={"min_unit_elements": min_unit})
    same_gradients(make(Model), 2, cfg, body, one_backward, then_a_child)


def test_dynamic_models_and_evaluation_between_steps() -> None:
    class Skipping(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, order: Any = (0, 1)) -> torch.Tensor:
            hidden = self.embed(x)
            for number in order:
                hidden = self.blocks[number](hidden)
            out = self.head(hidden) * self.gain
            return out if y is None else mse(out, y)

    model = make(Skipping)
    orders: list[Any] = [(0, 1), (1, 0), (0,), (1, 1, 0), (), (0, 1)]

    def body(engine: tessera.Engine, rank: int) -> Any:
        results = []
        for k, order in enumerate(orders):
            engine.eval()
            with torch.no_grad():
                engine(batch(k)[0], order=order[::-1])
            engine.train()
            engine(*batch(rank + k), order).backward()
            assert gathered(engine) == []
            results.append(full_grads(engine))
            engine.zero_grad()
        return results

    for results in engines(model, 2, config(3), body):
        for k, order in enumerate(orders):
            assert_close(results[k], plain_grads(model, 2, lambda m, r, k=k, o=order: m(*batch(r + k), o).backward()))


def test_inference_without_an_optimizer() -> None:
    model = make()
    want = model(batch(0)[0])
    cfg = config(3)
    del cfg["optimizer"]

    def body(engine: tessera.Engine, rank: int) -> Any:
        with torch.inference_mode():
            for _ in range(3):
                out = engine(batch(0)[0])
        assert gathered(engine) == []
        return out

    for out in engines(model, 2, cfg, body):
        torch.testing.assert_close(out, want)


def test_peak_does_not_grow_over_steps() -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        sizes = []
        for k in range(50):
            engine(*batch(rank + k)).backward()
            engine.step()
            sizes.append(engine.core.memory().buckets)
        assert sizes[-1] == sizes[3]

    engines(make(Net, 16, 4), 2, config(3, tessera={"min_unit_elements": 1}), body)


def test_a_compilation_on_another_thread_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compiler.is_compiling() is one flag for all threads; here it goes up while a module inside a block runs."""

    def flag(value: bool) -> Any:
        return lambda *_: monkeypatch.setattr(torch.compiler, "_is_compiling_flag", value)

    def body(engine: tessera.Engine, rank: int) -> None:
        for block in engine.module.blocks:
            block.linear.register_forward_pre_hook(flag(True))
            block.register_forward_hook(flag(False))
        engine(*batch(rank)).backward()

    same_gradients(make(), 2, config(3, tessera={"min_unit_elements": 1}), body, one_backward, none_is_whole)


@pytest.mark.usefixtures("threads_compile")
def test_compiled_blocks_are_compiled_once() -> None:
    """Whole graphs, the gradients of plain PyTorch, and no recompilation in later steps."""
    frames: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        frames.append(1)
        return graph.forward

    def body(engine: tessera.Engine, rank: int) -> None:
        if rank == 0:
            for block in engine.module.blocks:
                block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
        counts = []
        for _ in range(3):
            engine.zero_grad()
            engine(*batch(rank)).backward()
            assert gathered(engine) == []
            counts.append(len(frames))
        assert rank == 1 or counts[0] == counts[-1] > 0

    same_gradients(make(Net, 8, 2), 2, config(3, tessera={"min_unit_elements": 1}), body, one_backward)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_after_a_backward_that_failed_beside_one_that_did_not(stage: int, managed: bool, world: int) -> None:
    """As in PyTorch, the gradients of the first count, and what the second had added. Also where a step follows."""

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("the client's hook")

    def two_backwards(loss: Callable[[int], torch.Tensor], weight: torch.Tensor) -> None:
        loss(0).backward()
        handle = weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="the client's hook"):
            loss(10).backward()
        handle.remove()

    def body(engine: Any, rank: int) -> Any:
        two_backwards(lambda k: engine(*batch(k + rank)), engine.module.blocks[0].linear.weight)
        engine.step()
        engine(*batch(20 + rank)).backward()
        engine.step()
        return weights(engine.module)

    plain = make()
    for k in (0, 20):
        ranks = [copy.deepcopy(plain) for _ in range(world)]
        for rank, model in enumerate(ranks):
            if k == 0:
                two_backwards(lambda k, model=model, rank=rank: model(*batch(k + rank)), model.blocks[0].linear.weight)
            else:
                model(*batch(k + rank)).backward()
        with torch.no_grad():
            for param, *grads in zip(plain.parameters(), *(model.parameters() for model in ranks), strict=True):
                param -= 0.1 * sum(one.grad for one in grads) / world
    cfg = config(stage, managed_gradient_accumulation=managed) | {"tessera": {"min_unit_elements": 1}}
    for found in engines(make(), world, cfg, body):
        expected = {name: param.detach() for name, param in plain.named_parameters()}
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # fp32, sums in another order
