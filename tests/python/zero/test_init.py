"""zero.Init: models built in partitions."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Net, batch, config, free_port, make, masters, run_processes, run_ranks, same_bits, weights
from torch import nn

import tessera
from tessera import zero

LINEAR_INIT = nn.Linear.__init__


def is_partitioned(param: torch.Tensor) -> bool:
    try:
        param.detach().sum()
    except RuntimeError as error:
        assert "is partitioned" in str(error) and "GatheredParameters" in str(error)
        return True
    return False


class Numbered(Net):
    """Known values, set by a parent after its children are complete: attributes, apply() and a loop over parameters."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        nn.init.constant_(self.embed.weight, 0.25 + rank)
        self.apply(lambda m: m.weight.data.fill_(0.5 + rank) if isinstance(m, nn.LayerNorm) else None)
        with torch.no_grad():
            for number, (name, param) in enumerate(self.named_parameters()):
                if "linear" in name:
                    param.copy_(torch.linspace(-1, 1, param.numel()).view(param.shape) / (number + 1 + rank))
            for param in self.head.parameters():
                param.fill_(0.125 + rank)
            self.embed.bias.zero_()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_trains_what_was_built_in_partitions(stage: int) -> None:
    def train(model: nn.Module, rank: int, group: tessera.Group) -> dict[str, torch.Tensor]:
        engine = tessera.Engine(model, config(stage), group=group)
        for step in range(3):
            engine(*batch(10 * step + rank)).backward()
            engine.step()
        result = masters(engine)
        engine.destroy()
        return result

    def body(rank: int, group: tessera.Group) -> None:
        with zero.Init(group=group, dtype=torch.float32):
            model = Numbered(rank)
        assert all(is_partitioned(p) for p in model.parameters())
        info = zero.partition_info(model.head.weight)
        assert info is not None and info.status == zero.ParamStatus.NOT_AVAILABLE and info.partitioned
        assert [p.shape for p in model.parameters()] == [p.shape for p in Net().parameters()]
        got, want = weights(model), weights(Numbered(0))
        assert same_bits(got, want), "rank 0's values hold"
        plain = train(Numbered(0), rank, group)
        early = train(model, rank, group)
        assert same_bits(early, plain)

    run_ranks(3, body)


def test_what_construction_code_reads_is_partitioned_again() -> None:
    """But for the last 2**21 elements: one of these layers."""
    most = 0

    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            nonlocal most
            self.layers = nn.ModuleList(nn.Linear(1200, 1200, bias=False) for _ in range(4))
            for number, layer in enumerate(self.layers):
                nn.init.constant_(layer.weight, number)
                params = [p for one in self.layers for p in dict.values(one._parameters) if p is not None]
                most = max(most, sum(not is_partitioned(p) for p in params))

    def body(rank: int, group: tessera.Group) -> None:
        with zero.Init(group=group, dtype=torch.float32):
            model = Probe()
        for number, value in enumerate(weights(model).values()):
            assert value is not None and value.eq(number).all()

    run_ranks(2, body)
    assert most == 1


def test_a_chain_of_constructors_sees_whole_parameters() -> None:
    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5, 3))

    def body(rank: int, group: tessera.Group) -> None:
        with zero.Init(group=group, dtype=torch.bfloat16):

            class Inside(Base):
                def __init__(self) -> None:
                    super().__init__()
                    assert self.weight.dtype == torch.float32 and self.weight.sum() == 15
                    self.weight.data *= 2
                    self.count = nn.Parameter(torch.arange(3), requires_grad=False)
                    self.register_buffer("positions", torch.arange(3.0))

            model = Inside()
            with zero.Init(group=group, dtype=torch.float64):  # absorbed
                inner = nn.Linear(3, 3)
        outside = nn.Linear(3, 3)
        assert is_partitioned(inner.weight)
        assert is_partitioned(model.weight) and model.weight.dtype == torch.bfloat16
        assert inner.weight.dtype == torch.bfloat16
        assert torch.equal(model.count, torch.arange(3)), "not floating point: whole, as it was"
        assert model.positions.dtype == torch.float32
        assert not is_partitioned(outside.weight) and outside.weight.dtype == torch.float32
        assert torch.equal(weights(model)["weight"], torch.full((5, 3), 2.0, dtype=torch.bfloat16))

    run_ranks(2, body)
    assert nn.Linear.__init__ is LINEAR_INIT
    assert "__init_subclass__" not in nn.Module.__dict__


def test_meta_skip_init_copies_ties_and_existing_modules() -> None:
    def body(rank: int, group: tessera.Group) -> None:
        with zero.Init(group=group, dtype=torch.float32):

            class Skipping(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.fast = nn.utils.skip_init(nn.Linear, 4, 6)
                    nn.init.ones_(self.fast.weight)
                    self.stack = nn.TransformerEncoder(
                        nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False
                    )
                    self.tied = nn.Linear(4, 6)
                    self.tied.weight = self.fast.weight

            model = Skipping()
            alone = nn.utils.skip_init(nn.Linear, 3, 3)
            with torch.device("meta"):
                ghost = nn.Linear(3, 3)
        assert all(is_partitioned(p) for p in [*model.parameters(), *alone.parameters()])
        assert torch.equal(weights(model)["fast.weight"], torch.ones(6, 4))
        assert model.tied.weight is model.fast.weight
        assert ghost.weight.is_meta
        with pytest.raises(tessera.ConfigError, match=r"'weight'.*meta"):
            tessera.Engine(ghost, config(3), group=group)
        first, second = (weights(layer) for layer in model.stack.layers)
        assert same_bits(first, second)

        existing = Numbered()
        zero.Init(module=existing, group=group, dtype=torch.float32)
        assert all(is_partitioned(p) for p in existing.parameters())
        assert all(torch.equal(a, b) for a, b in zip(weights(existing).values(), Numbered().parameters(), strict=True))

    run_ranks(2, body)


def test_frozen_parameters_and_engines_built_inside() -> None:
    def body(rank: int, group: tessera.Group) -> None:
        with zero.Init(group=group, dtype=torch.float32):
            model = Numbered(rank)
            for param in model.blocks.parameters():
                param.requires_grad_(False)
            engine = tessera.initialize(model=model, config=config(3), group=group)[0]
            after = nn.Linear(2, 2)
        assert is_partitioned(after.weight)
        for step in range(2):
            engine(*batch(10 * step + rank)).backward()
            engine.step()
        assert torch.equal(weights(model)["blocks.0.linear.weight"], Numbered().blocks[0].linear.weight)
        assert not torch.equal(weights(model)["head.weight"], Numbered().head.weight)
        engine.destroy()

    run_ranks(2, body)


def test_a_failing_constructor_leaves_nothing_behind() -> None:
    def body(rank: int, group: tessera.Group) -> None:
        class Failing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc = nn.Linear(3, 3)
                raise KeyError("no such head")

        with pytest.raises(KeyError), zero.Init(group=group):
            Failing()
        with zero.Init(group=group, dtype=torch.float32):
            model = nn.Linear(3, 3)
        assert is_partitioned(model.weight)

    run_ranks(2, body)
    assert nn.Linear.__init__ is LINEAR_INIT


M_MMAP_THRESHOLD = -3  # of malloc.h


def give_back_at_once() -> None:
    """What this process frees goes back to the system; how much of it glibc keeps otherwise is chance."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)


def drop_models(rank: int, folder: str) -> None:
    give_back_at_once()

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def body(rank: int, group: tessera.Group) -> None:
        with zero.Init(group=group, dtype=torch.float32):
            model = nn.Linear(1024, 1024)
        assert is_partitioned(model.weight)

    for _ in range(3):
        run_ranks(2, body)
    before = resident()
    for _ in range(20):
        run_ranks(2, body)
    torch.save(resident() - before, Path(folder) / "grown.pt")


def test_a_model_that_is_dropped_frees_its_shards(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(drop_models, args=(str(tmp_path),), nprocs=1)
    size = 4 * 1024 * 1024
    assert torch.load(tmp_path / "grown.pt") < 5 * size


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({}, torch.float16),
        ({"dtype": torch.bfloat16}, torch.bfloat16),
        ({"config": {"zero_optimization": {"stage": 3}, "train_batch_size": 1}}, torch.float32),
        ({"config": {"bf16": {"enabled": True}, "train_batch_size": "auto"}}, torch.bfloat16),
    ],
)
def test_dtype(given: dict[str, Any], want: torch.dtype) -> None:
    with zero.Init(**given):
        layer = nn.Linear(2, 2)
    assert layer.weight.dtype == want and not is_partitioned(layer.weight), "one rank only casts"
    with zero.Init(enabled=False, **given):
        layer = nn.Linear(2, 2)
    assert layer.weight.dtype == torch.float32


def test_wrong_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(tessera.ConfigError, match="floating-point"):
        zero.Init(dtype=torch.int8)
    monkeypatch.setattr("tessera.distributed.prepare", lambda *_: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError, match=r"rank 0 of 2.*init_distributed"):
        zero.Init(dtype=torch.float32)
    zero.Init(dtype=torch.float32, group=tessera.thread_groups(1)[0])


class Big(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(32)])
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.xavier_uniform_(param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def build_in_process(rank: int, port: int, folder: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    tessera.init_distributed("gloo")
    give_back_at_once()
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # noqa: E731
    with zero.Init(dtype=torch.float32):
        nn.Linear(1024, 1024)  # what is allocated once
        before = peak()
        big = Big()
    grown = peak() - before
    size = sum(4 * p.numel() for p in big.parameters())
    options = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(7)
    with zero.Init(dtype=torch.float32):
        llama = LlamaForCausalLM(options)
    partitioned = all(is_partitioned(p) for p in llama.parameters())
    state = weights(llama)
    torch.manual_seed(7)
    plain = LlamaForCausalLM(options)
    same = all(torch.equal(state[name], param) for name, param in plain.named_parameters())
    engine = tessera.initialize(model=llama, config=config(3))[0]
    tokens = torch.arange(24).view(2, 12) % 64
    loss = engine(input_ids=tokens, labels=tokens).loss
    close = torch.allclose(loss, plain(input_ids=tokens, labels=tokens).loss)
    loss.backward()
    engine.step()
    torch.save((grown / size, partitioned, same, close), Path(folder) / f"{rank}.pt")


def test_processes_build_models_larger_than_their_share(tmp_path: Path) -> None:
    run_processes(2, build_in_process, free_port(), str(tmp_path))
    for rank in range(2):
        grown, partitioned, same, close = torch.load(tmp_path / f"{rank}.pt")
        assert grown < 0.6, "half of the model, what is being built, and what construction code has open"
        assert partitioned and same and close


class Replacing(nn.Module):
    """A parent that gives its children's parameters other data, and one that torch parametrizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.first.weight.data = torch.full((8, 8), 3.0)
        self.last = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)).square().mean()


@pytest.mark.parametrize("stage", [0, 3])
def test_data_that_a_parent_replaced_is_the_value(stage: int) -> None:
    def run(rank: int, group: tessera.Group) -> None:
        with zero.Init(group=group, config=config(3)):
            model = Replacing()
        assert torch.equal(weights(model)["first.weight"], torch.full((8, 8), 3.0))
        model.first.weight.data = torch.full((8, 8), 4.0)
        engine = tessera.Engine(model, config(stage), group=group)
        assert torch.equal(weights(model)["first.weight"], torch.full((8, 8), 4.0))
        engine(torch.randn(2, 8)).backward()
        engine.step()
        engine.destroy()

    run_ranks(2, run)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_built_so_later_and_added_is_whole_and_trained(world: int, stage: int) -> None:
    model, values_of_late = make(), nn.Linear(3, 3).state_dict()

    def body(rank: int, group: tessera.Group) -> None:
        values = []
        for early in (False, True):
            engine = tessera.Engine(copy.deepcopy(model), config(stage), group=group)
            with zero.Init(enabled=early, group=group, dtype=torch.float32):
                engine.module.late = nn.Linear(3, 3)
            with zero.GatheredParameters(list(engine.module.late.parameters()), modifier_rank=0), torch.no_grad():
                engine.module.late.load_state_dict(values_of_late)
            late = engine.module.late
            if early:
                with zero.Init(group=group, dtype=torch.bfloat16):
                    other = nn.Linear(3, 3)
                with pytest.raises(tessera.ConfigError, match="is BFloat16"):
                    engine.optimizer.add_param_group({"params": list(other.parameters())})
                assert is_partitioned(other.weight) == (world == 2)
            engine.optimizer.add_param_group({"params": list(late.parameters()), "lr": 0.05})
            for step in range(2):
                x, y = batch(10 * step + rank)
                engine.backward((late(engine(x)) - y).square().mean())
                engine.step()
            assert not is_partitioned(late.weight)
            values.append(masters(engine))
            engine.destroy()
        assert same_bits(*values) and "late.weight" in values[0]

    run_ranks(world, body)
