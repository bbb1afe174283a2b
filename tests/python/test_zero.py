"""Stage 3 from Python: what is partitioned when, regions, external parameters, leaf modules, bad use."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from support import Block, Net, assert_close, batch, config, engines, full_grads, make, mse, plain_grads, weights
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import tessera
from tessera.zero import GatheredParameters


def gathered(engine: tessera.Engine) -> list[str]:
    names = [name for name, _ in engine.module.named_parameters()]
    return [name for number, name in enumerate(names) if engine.core.is_gathered(number)]


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

    cfg = config(3)
    cfg["zero_optimization"]["stage3_prefetch_bucket_size"] = 0
    cfg["tessera"] = {"min_unit_elements": 1}
    engines(make(), 2, cfg, body)


def test_small_parameters_stay() -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        assert {name for name in gathered(engine)} == {
            name for name, param in engine.module.named_parameters() if param.numel() <= 7
        }
        engine(*batch(rank)).backward()
        engine.step()

    cfg = config(3)
    cfg["zero_optimization"]["stage3_param_persistence_threshold"] = 7
    engines(make(), 2, cfg, body)


@pytest.mark.parametrize(
    "read",
    [
        lambda p: p + 1,
        lambda p: p.sum().item(),
        lambda p: copy.deepcopy(p),
        lambda p: repr(p),
        lambda p: p.numpy(force=True),
        lambda p: p.data.copy_(torch.zeros(3, 7)),
        lambda p: torch.save(p, "/dev/null"),
    ],
    ids=["add", "item", "deepcopy", "repr", "numpy", "write", "save"],
)
def test_reading_a_partitioned_parameter_names_it(read: Any) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        with pytest.raises(RuntimeError, match=r"head\.weight.*GatheredParameters"):
            read(engine.module.head.weight)
        assert engine.module.head.weight.shape == (3, 7)

    engines(make(), 2, config(3), body)


def test_regions_read_and_write() -> None:
    model = make()

    def body(engine: tessera.Engine, rank: int) -> None:
        weight = engine.module.head.weight
        with GatheredParameters(weight):
            torch.testing.assert_close(weight, model.head.weight)
        with GatheredParameters([weight, engine.module.gain], modifier_rank=1), torch.no_grad():
            weight.data.fill_(rank)
        torch.testing.assert_close(tessera.state.get_full_fp32_param(engine, weight), torch.ones(3, 7))
        with (
            pytest.raises(tessera.UsageError, match="in-place modification"),
            GatheredParameters(weight),
            torch.no_grad(),
        ):
            weight.zero_()
        with (
            pytest.raises(RuntimeError, match="overlap"),
            GatheredParameters(weight),
            GatheredParameters(engine.module.head.parameters()),
        ):
            pass
        with GatheredParameters(weight, enabled=False), pytest.raises(RuntimeError, match="partitioned"):
            weight.sum()
        assert gathered(engine) == []
        engine(*batch(rank)).backward()
        engine.step()

    engines(model, 2, config(3), body)


def test_ordinary_parameters_pass_through() -> None:
    layer = nn.Linear(2, 2)
    with GatheredParameters(layer.parameters(), modifier_rank=0), torch.no_grad():
        layer.weight.zero_()
    assert not layer.weight.any()


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
    model = make(Tied)

    def pattern(m: Any, rank: int) -> None:
        for k in range(2):
            m(*batch(rank + k)).backward()

    def body(engine: tessera.Engine, rank: int) -> Any:
        pattern(engine, rank)
        assert gathered(engine) == []
        return full_grads(engine)

    for grads in engines(model, 2, config(3, accumulation), body):
        assert_close(grads, plain_grads(model, 2, pattern, scale=1 / accumulation))


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

    def body(engine: tessera.Engine, rank: int) -> Any:
        module = engine.module
        with pytest.raises(RuntimeError, match="register_external_parameter"):
            engine(*batch(rank))
        assert gathered(engine) == []
        tessera.zero.register_external_parameter(module.reader, module.first.weight)
        engine(*batch(rank)).backward()
        return full_grads(engine)

    for grads in engines(model, 2, config(3), body):
        assert_close(grads, plain_grads(model, 2, lambda m, rank: m(*batch(rank)).backward()))
    with pytest.raises(tessera.UsageError, match="Parameter"):
        tessera.zero.register_external_parameter(model.reader, torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(tessera.UsageError, match="not registered"):
        tessera.zero.unregister_external_parameter(model.reader, model.first.bias)


class Experts(nn.Module):
    """Each rank takes experts of its own; some get no input at all."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(count))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> tuple[torch.Tensor, int]:
        return x + sum(torch.tanh(self.experts[i](x)) for i in chosen), len(chosen)


class Mixture(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7)
        self.layers = nn.ModuleList(Experts() for _ in range(layers))
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor, rank: int, k: int) -> torch.Tensor:
        hidden = self.embed(x.to(self.embed.weight.dtype))
        for number, layer in enumerate(self.layers):
            # Rank 0 uses all experts of some layers, the others one: gradients complete at different places.
            chosen = [0, 1, 2, 3] if rank == 0 and (number + k) % 2 else [(rank + number + k) % 4]
            hidden, _ = layer(hidden, chosen)
        return mse(self.head(hidden), y)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("min_unit", [1, 1 << 20])
def test_leaf_modules_with_different_experts_do_not_hang(world: int, min_unit: int) -> None:
    model = make(Mixture)

    def pattern(m: Any, rank: int) -> None:
        for k in range(3):  # several backwards of one step
            m(*batch(rank + k), rank, k).backward()

    def body(engine: tessera.Engine, rank: int) -> Any:
        pattern(engine, rank)
        assert gathered(engine) == []
        grads = full_grads(engine)
        engine.step()
        return grads, weights(engine.module)

    cfg = config(3)
    cfg["zero_optimization"]["leaf_module"] = {"classes": ["Experts"]}
    cfg["tessera"] = {"min_unit_elements": min_unit}
    for grads, _ in engines(model, world, cfg, body):
        assert_close(grads, plain_grads(model, world, pattern))


def test_leaf_marks() -> None:
    model = make(Mixture)
    zero = tessera.zero
    layers = list(model.layers)
    assert zero.get_z3_leaf_modules(model) == []
    assert zero.set_z3_leaf_modules(model, [Experts]) == layers
    assert zero.get_z3_leaf_modules(model) == layers and zero.z3_leaf_module(layers[0])
    assert zero.unset_z3_leaf_modules(model, "Experts") == layers
    assert zero.set_z3_leaf_modules(model, f"{Experts.__module__}.Experts") == layers
    zero.set_z3_leaf_module(layers[1], False)
    assert zero.get_z3_leaf_modules(model) == [layers[0], layers[2]]
    assert zero.set_z3_leaf_modules_by_name(model, ["layers.1", "none"], raise_if_not_found=False) == (
        [layers[1]],
        ["none"],
    )
    assert zero.set_z3_leaf_modules_by_suffix(model, ["ers.2"], flag=False)[0][0] is layers[2]
    assert not zero.z3_leaf_module(layers[2])
    with pytest.raises(ValueError, match="Nothing"):
        zero.set_z3_leaf_modules(model, ["Nothing"])
    with pytest.raises(ValueError, match=r"layers\.9"):
        zero.set_z3_leaf_modules_by_name(model, ["layers.9"])
    with pytest.raises(AssertionError, match="int"):
        zero.set_z3_leaf_modules(model, [3])  # type: ignore[list-item]


def test_a_leaf_of_the_configuration_that_matches_nothing_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(3)
    cfg["zero_optimization"]["leaf_module"] = {"classes": ["Missing"], "names": "nowhere"}
    with caplog.at_level(logging.WARNING, logger="tessera"):
        tessera.Engine(make(), cfg).destroy()
    text = caplog.text
    assert "Missing" in text and "nowhere" in text and "Mixtral" not in text


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

        def body(engine: tessera.Engine, rank: int) -> Any:
            for _ in range(2):
                engine(*batch(rank)).backward()
                assert gathered(engine) == []
            assert engine.core.memory().states < 4 * 3 * 28 * 8
            return full_grads(engine)

        def pattern(m: nn.Module, rank: int) -> None:
            for _ in range(2):
                m(*batch(rank)).backward()

        adam = {"type": "AdamW", "params": {"lr": 0.01}}
        want = {name: grad for name, grad in plain_grads(model, 2, pattern).items()}
        for grads in engines(model, 2, config(3, optimizer=adam), body):
            assert_close(grads, want)


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

    model = make(Model)

    def body(engine: tessera.Engine, rank: int) -> Any:
        with set_checkpoint_early_stop(early_stop):
            Shaky.fail = True
            loss = engine(*batch(rank))
            with pytest.raises(RuntimeError, match="recompute failed"):
                loss.backward()
            assert gathered(engine) == []
            engine.zero_grad()
            engine._group.barrier()
            Shaky.fail = False
            engine._group.barrier()
            engine(*batch(rank)).backward()
        assert gathered(engine) == []
        return full_grads(engine)

    for grads in engines(model, 2, config(3), body):
        assert_close(grads, plain_grads(model, 2, lambda m, rank: m(*batch(rank)).backward()))


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
            assert_close(
                results[k], plain_grads(model, 2, lambda m, r, k=k, o=order: m(*batch(r + k), o).backward())
            )


def test_state_dict_and_file_have_whole_values(tmp_path: Any) -> None:
    model = make()

    def body(engine: tessera.Engine, rank: int) -> Any:
        state = engine.module_state_dict()
        assert engine.save_16bit_model(str(tmp_path), f"{rank}.bin")
        return state

    cfg = config(3)
    cfg["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    for state in engines(model, 2, cfg, body):
        assert_close(state, dict(model.state_dict()))
    assert_close(torch.load(tmp_path / "0.bin"), dict(model.state_dict()))

    def refused(engine: tessera.Engine, rank: int) -> None:
        with pytest.raises(tessera.UsageError, match="stage3_gather_16bit_weights_on_model_save"):
            engine.save_16bit_model(str(tmp_path))

    engines(model, 2, config(3), refused)


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

    cfg = config(3)
    cfg["tessera"] = {"min_unit_elements": 1}
    engines(make(Net, 16, 4), 2, cfg, body)
