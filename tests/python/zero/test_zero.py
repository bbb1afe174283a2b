"""Regions, registered external parameters, whole values for files, bad use of partitioned parameters."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
from support import assert_close, batch, config, engines, gathered, make, run_ranks, shard_group
from torch import nn

import tessera
from tessera import zero
from tessera.zero import GatheredParameters


@pytest.mark.parametrize(
    "read",
    [
        lambda p: p + 1,
        lambda p: p.sum().item(),
        lambda p: repr(p),
        lambda p: p.numpy(force=True),
        lambda p: p.data.copy_(torch.zeros(3, 7)),
        lambda p: torch.save(p, "/dev/null"),
    ],
    ids=["add", "item", "repr", "numpy", "write", "save"],
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


COPIES: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "averaged": lambda module: torch.optim.swa_utils.AveragedModel(module).module,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "of a block": lambda module: copy.deepcopy(module.blocks[0]),
}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("way", COPIES)
def test_copies_of_a_module_are_plain(way: str, stage: int) -> None:
    """They keep their values, are in no engine's care, and neither gather nor reduce."""
    model = make()
    origin = model.blocks[0] if way == "of a block" else model
    inputs = torch.ones(4, 7 if way == "of a block" else 5)

    def body(engine: tessera.Engine, rank: int) -> None:
        with GatheredParameters(engine.module.parameters() if way == "pickle" else []):
            other = COPIES[way](engine.module)
        if stage == 3 and way == "pickle":
            with pytest.raises(RuntimeError, match="is partitioned"):
                COPIES[way](engine.module)
        engine(*batch(rank)).backward()
        engine.step()
        assert_close(dict(other.named_parameters()), dict(origin.named_parameters()))
        shard_group(engine).reset_stats()
        for plain in (other, copy.deepcopy(other)):
            for ours, theirs in zip(plain.modules(), origin.modules(), strict=True):
                assert vars(ours).keys() == vars(theirs).keys() and type(ours._parameters) is dict
                assert not ours._forward_pre_hooks and not ours._forward_hooks
            plain.zero_grad()
            plain(inputs).sum().backward()
            assert all(p.grad is not None for p in plain.parameters())
            assert b"tessera." not in pickle.dumps(plain)
        stats = shard_group(engine).stats()
        assert stats.all_gather.calls + stats.reduce_scatter.calls + stats.all_reduce.calls == 0
        assert gathered(engine) == [] or stage < 3
        engine(*batch(rank)).backward()
        engine.step()

    engines(model, 2, config(stage), body)


def test_an_average_of_weights_follows_a_partitioned_model() -> None:
    model = make()

    def body(engine: tessera.Engine, rank: int) -> Any:
        params = list(engine.module.parameters())
        with GatheredParameters(params):
            average = torch.optim.swa_utils.AveragedModel(engine.module)
        seen = []
        for k in range(3):
            engine(*batch(rank + k)).backward()
            engine.step()
            with GatheredParameters(params):
                average.update_parameters(engine.module)
                seen.append([p.detach().clone() for p in params])
        want = [torch.stack(values).mean(0) for values in zip(*seen, strict=True)]
        for got, value in zip(average.module.parameters(), want, strict=True):
            torch.testing.assert_close(got, value)

    engines(model, 2, config(3), body)


def test_a_region_that_cannot_open_leaves_nothing_open() -> None:
    models = [make(), make()]

    def body(rank: int, group: tessera.Group) -> None:
        first, second = (tessera.Engine(copy.deepcopy(model), config(3), group=group) for model in models)
        both = [*first.module.parameters(), *second.module.parameters()]
        inner = GatheredParameters(both)
        with GatheredParameters(second.module.gain), pytest.raises(RuntimeError, match="overlap"), inner:
            pass
        with pytest.raises(KeyboardInterrupt), GatheredParameters(both, modifier_rank=0):
            raise KeyboardInterrupt
        with GatheredParameters(both):
            assert gathered(first) == [name for name, _ in first.module.named_parameters()]
        for engine in (first, second):
            assert gathered(engine) == []
            engine(*batch(rank)).backward()
            engine.step()
            engine.destroy()

    run_ranks(2, body)


@pytest.mark.parametrize("stage", [2, 3])
def test_partition_info(stage: int) -> None:
    def body(engine: tessera.Engine, rank: int) -> tuple[int, int, torch.Tensor]:
        weight = engine.module.head.weight
        info = zero.partition_info(weight)
        assert info is not None and info.partitioned == (stage == 3)
        whole = zero.ParamStatus.AVAILABLE
        assert info.status == (zero.ParamStatus.NOT_AVAILABLE if stage == 3 else whole)
        with GatheredParameters(weight):
            inside = zero.partition_info(weight)
            assert inside is not None and inside.status == whole
            assert torch.equal(info.local, weight.detach().flatten()[info.begin : info.end])
        return info.begin, info.end, info.local.clone()

    model = make()
    got = engines(model, 2, config(stage), body)
    if stage == 3:
        assert got[0][0] == 0 and got[0][1] == got[1][0] and got[1][1] == 21
        assert torch.equal(torch.cat([g[2] for g in got]), model.head.weight.detach().flatten())
    else:
        assert [g[:2] for g in got] == [(0, 21)] * 2
    assert zero.partition_info(model.head.weight) is None


class Parts(nn.Module):
    """Partitioned, resident (small), frozen and frozen small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 40), nn.Linear(40, 3)
        self.frozen = nn.Parameter(torch.randn(40, 5), requires_grad=False)
        self.small = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x.to(self.up.weight.dtype))) + x.to(self.frozen.dtype) @ self.frozen.t()
        return (self.down(hidden) + self.small - y).float().square().mean()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_a_writers_values_hold_in_every_stage(stage: int, mode: str, shared: bool) -> None:
    cfg = config(stage, zero={"stage3_param_persistence_threshold": 50}, tessera={"shared_parameters": shared})
    if mode != "fp32":
        cfg[mode] = {"enabled": True}

    def body(engine: tessera.Engine, rank: int) -> Any:
        params = dict(engine.module.named_parameters())
        with GatheredParameters(params.values(), modifier_rank=1):
            if rank == 1:
                for param in params.values():
                    param.data.fill_(0.25)
        for param in params.values():
            if param.requires_grad:
                assert tessera.state.get_full_fp32_param(engine, param).eq(0.25).all()
        state = engine.module_state_dict()
        assert all(value.eq(0.25).all() for value in state.values()), state
        engine.backward(engine(*batch(rank)))
        engine.step()
        return {name: value.clone() for name, value in engine.module_state_dict().items()}

    first, second, third = engines(make(Parts), 3, cfg, body)
    for name, value in first.items():
        assert torch.equal(value, second[name]) and torch.equal(value, third[name]), name


@pytest.mark.parametrize("raising", ["all", "writer"])
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("stage", range(4))
def test_what_was_written_before_an_exception_left_a_region_holds(
    stage: int, world: int, mode: str, raising: str
) -> None:
    cfg = config(stage, zero={"stage3_param_persistence_threshold": 50})
    if mode != "fp32":
        cfg[mode] = {"enabled": True}
    writer = world - 1

    def body(engine: tessera.Engine, rank: int) -> Any:
        params = dict(engine.module.named_parameters())
        stops = raising == "all" or rank == writer
        said = pytest.raises(KeyError, match="half way") if stops else contextlib.nullcontext()
        with said, GatheredParameters(params.values(), modifier_rank=writer):
            for param in params.values():
                param.data.fill_(0.25 + rank)
            if stops:
                raise KeyError("half way")
        for param in params.values():
            if param.requires_grad:
                assert tessera.state.get_full_fp32_param(engine, param).eq(0.25 + writer).all()
        assert all(value.eq(0.25 + writer).all() for value in engine.module_state_dict().values())

    engines(make(Parts), world, cfg, body)


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_a_writer_that_is_no_rank_opens_nothing(stage: int, built: bool) -> None:
    def body(rank: int, group: tessera.Group) -> None:
        with zero.Init(group=group, config=config(stage), enabled=built):
            model = make()
        engine = None if built else tessera.Engine(model, config(stage), group=group)
        for wrong in (-1, 2, 100):
            says = f"modifier_rank {wrong} is no rank of a group of 2"
            region = GatheredParameters(model.parameters(), modifier_rank=wrong)
            with pytest.raises(tessera.ConfigError, match=says), region:
                raise AssertionError("it is open")
        with GatheredParameters(model.parameters(), modifier_rank=1):
            pass
        if engine is not None:
            engine.destroy()

    run_ranks(2, body)


def test_one_rank_replaces_data_while_a_model_is_built() -> None:
    def body(rank: int, group: tessera.Group) -> None:
        with zero.Init(group=group, config=config(3)):
            layer = nn.Linear(6, 7)
        for _ in range(2):
            with GatheredParameters(layer.weight, modifier_rank=1):
                if rank == 1:
                    layer.weight.data = torch.full((7, 6), 3.0)
            with GatheredParameters(layer.weight):
                assert layer.weight.eq(3).all()

    run_ranks(2, body)


PACKED = torch.arange(0x7F00, 0x8100, dtype=torch.int32).to(torch.int16)  # NaNs with payloads among them, of both signs


TURNS = torch.polar(torch.ones(6), torch.arange(6.0))  # complex, as a table of rotary positions


class Packed(nn.Module):
    """Frozen parameters whose words are no numbers (packed 4-bit weights), or of another dtype, and a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.words = nn.Parameter(PACKED.clone().view(torch.bfloat16), requires_grad=False)
        self.bytes = nn.Parameter(torch.arange(64, dtype=torch.uint8), requires_grad=False)
        self.turns = nn.Parameter(TURNS.clone(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.equal(self.words.view(torch.int16), PACKED)
        return self.linear(x.to(self.linear.weight.dtype)).float().square().mean()


@pytest.mark.parametrize(("bf16", "early"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", range(4))
def test_frozen_words_travel_as_they_are(stage: int, world: int, bf16: bool, early: bool, tmp_path: Any) -> None:
    cfg = config(stage, bf16=bf16, zero={"stage3_gather_16bit_weights_on_model_save": True})

    def check(engine: tessera.Engine) -> None:
        engine.save_16bit_model(tmp_path, "weights.bin")
        for state in (engine.module_state_dict(), torch.load(tmp_path / "weights.bin")):
            assert torch.equal(state["words"].view(torch.int16), PACKED)
            assert torch.equal(state["bytes"], torch.arange(64, dtype=torch.uint8))
            assert torch.equal(state["turns"], TURNS)

    def body(rank: int, group: tessera.Group) -> None:
        with zero.Init(group=group, config=cfg, enabled=early):
            model = Packed()
        if rank > 0 and not early:
            model.words.data.zero_()
            model.turns.data.zero_()
        engine = tessera.Engine(model, cfg, group=group)
        check(engine)
        engine.backward(engine(batch(rank)[0]))
        engine.step()
        check(engine)
        engine.save_checkpoint(tmp_path)
        with GatheredParameters([model.words, model.turns], modifier_rank=0):
            model.words.data.zero_()
            model.turns.data.zero_()
        engine.load_checkpoint(tmp_path)
        check(engine)
        engine.destroy()

    run_ranks(world, body)


def test_ordinary_parameters_pass_through() -> None:
    layer = nn.Linear(2, 2)
    with GatheredParameters(layer.parameters(), modifier_rank=0), torch.no_grad():
        layer.weight.zero_()
    assert not layer.weight.any()


def test_state_dict_and_file_have_whole_values(tmp_path: Any) -> None:
    model = make()

    def body(engine: tessera.Engine, rank: int) -> Any:
        state = engine.module_state_dict()
        assert engine.save_16bit_model(str(tmp_path), f"{rank}.bin")
        return state

    for state in engines(model, 2, config(3, zero={"stage3_gather_16bit_weights_on_model_save": True}), body):
        assert_close(state, dict(model.state_dict()))
    assert_close(torch.load(tmp_path / "0.bin"), dict(model.state_dict()))

    def refused(engine: tessera.Engine, rank: int) -> None:
        with pytest.warns(UserWarning, match="stage3_gather_16bit_weights_on_model_save"):
            assert not engine.save_16bit_model(str(tmp_path / "new"))
        assert not (tmp_path / "new").exists()

    engines(model, 2, config(3), refused)


@pytest.mark.parametrize(("stage", "units"), [(2, 2), (3, 4)])
def test_how_many_units_are_on_their_way(stage: int, units: int) -> None:
    """Gradients: one fills, one travels. Parameters in stage 3: one is used, one is gathered early."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(8)])

    def train(engine: tessera.Engine, rank: int) -> int:
        for _ in range(3):
            engine.backward(engine(torch.ones(4, 64)).square().mean())
            engine.step()
        return engine.core.memory().peak_buckets

    cfg = config(stage, tessera={"min_unit_elements": 0})
    assert engines(model, 2, cfg, train) == [units * 64 * 64 * 4] * 2


@pytest.mark.parametrize("keepers", [{0}, {0, 1}])
def test_ranks_may_keep_their_losses(keepers: set[int]) -> None:
    """A graph that lives on is none that a backward has yet to go through."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(8)])
    cfg = config(3, tessera={"min_unit_elements": 0})

    def train(engine: tessera.Engine, keeps: bool) -> int:
        kept = []
        for _ in range(3):
            loss = engine(torch.ones(4, 7)).square().mean()
            engine.backward(loss)
            engine.step()
            if keeps:
                kept.append(loss)
        return engine.core.memory().peak_buckets

    plain = engines(model, 2, cfg, lambda engine, rank: train(engine, False))
    assert engines(model, 2, cfg, lambda engine, rank: train(engine, rank in keepers)) == plain


@pytest.mark.parametrize("writer", [None, 0])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("mode", ["fp32", "bf16", "client", "in backward"])
def test_a_step_inside_a_region_is_refused(mode: str, stage: int, world: int, writer: int | None) -> None:
    """Of every parameter, for reading and for writing; what was written holds, and the engine goes on."""
    if mode == "in backward" and stage == 0:
        pytest.skip("stage 0 has no update in the backward")
    sections = {"bf16": {"bf16": {"enabled": True}}, "in backward": {"tessera": {"update_in_backward": True}}}
    cfg = config(stage, zero={"stage3_param_persistence_threshold": 8}, **sections.get(mode, {}))
    client = (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5)) if mode == "client" else None
    if client is not None:
        cfg.pop("optimizer", None)

    kind = RuntimeError if mode == "in backward" else tessera.UsageError  # through autograd

    def body(engine: tessera.Engine, rank: int) -> None:
        for param in (engine.module.head.weight, engine.module.head.bias, engine.module.gain):
            steps = engine.global_steps
            if mode != "in backward":
                engine(*batch(rank)).backward()
            with GatheredParameters([param], modifier_rank=writer):
                if writer is not None and rank == writer:
                    param.data.fill_(1.5)
                with pytest.raises(kind, match=r"in use \(inside GatheredParameters\)"):
                    if mode == "in backward":
                        engine(*batch(rank)).backward()
                    engine.step()
            with GatheredParameters([param]):
                assert writer is None or param.eq(1.5).all()
            assert engine.global_steps == steps
            if mode == "in backward":
                engine(*batch(rank)).backward()
            engine.step()
            assert engine.global_steps == steps + 1

    engines(make(), world, cfg, body, client)
