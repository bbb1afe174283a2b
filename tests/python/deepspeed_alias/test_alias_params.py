"""ds_ attributes of partitioned parameters, on two ranks (threads), and zero.Init."""

from __future__ import annotations

import contextlib
import copy
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, zero_wrapper_for_fp_tensor_constructor
from support import Net, batch, config, free_port, make, run_processes, run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import tessera

WORLD = 2


def on_ranks(body: Callable[[Any, int], Any], **more: Any) -> list[Any]:
    """body(engine, rank) in stage 3 with every parameter partitioned."""
    copies = [make() for _ in range(WORLD)]

    def run(rank: int, group: Any) -> Any:
        engine = deepspeed.DeepSpeedEngine(copies[rank], config(3, **more), group=group)
        try:
            return body(engine, rank)
        finally:
            engine.destroy()

    return run_ranks(WORLD, run)


def test_attributes_of_a_partitioned_parameter() -> None:
    whole = make().embed.weight.detach().clone()

    def body(engine: Any, rank: int) -> torch.Tensor:
        weight = engine.module.embed.weight
        assert isinstance(weight, nn.Parameter)
        assert weight.shape == (0,) and weight.numel() == weight.size(0) == weight.nelement() == 0
        assert weight.ds_shape == (7, 5) and weight.ds_numel == 35 and weight.partition_numel() == 18
        assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE and not weight.ds_persist
        assert len({p.ds_id for p in engine.parameters()}) == len(list(engine.parameters()))
        assert sum(p.numel() for p in engine.parameters()) == 0
        weight.ds_active_sub_modules.clear()
        assert engine.module.ds_external_parameters() == []
        piece = weight.ds_tensor
        assert piece.ds_numel == piece.numel() == 18
        assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
        weight.all_gather()
        assert weight.ds_status == ZeroParamStatus.AVAILABLE and weight.shape == (7, 5)
        torch.testing.assert_close(weight.detach(), whole)
        torch.testing.assert_close(weight.ds_tensor, piece)
        weight.partition()
        weight.all_gather_coalesced([weight]).wait()
        weight.partition()
        assert weight.ds_summary()["ds_shape"] == (7, 5) and weight.ds_summary()["shape"] == (0,)
        return piece

    pieces = on_ranks(body)
    flat = torch.cat([whole.reshape(-1), torch.zeros(1)])
    torch.testing.assert_close(torch.cat(pieces), flat)


def into_numpy(x: torch.Tensor) -> None:
    x.view(torch.int16).numpy()[3:5] = 0x3C00


WRITES: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x.copy_(torch.ones(18)),
    lambda x: x.data.zero_(),
    lambda x: x.detach().mul_(2),
    lambda x: x[:2].fill_(1),
    lambda x: x.view(-1, 2).add_(1),
    lambda x: x.__setitem__(0, 3.0),
    lambda x: x.__iadd__(1),
    lambda x: setattr(x, "data", torch.ones(18, dtype=x.dtype)),
    lambda x: x.set_(torch.ones(18, dtype=x.dtype)),
    lambda x: torch.add(x, 1, out=x),
    lambda x: torch.max(torch.ones(2, 18, dtype=x.dtype), 0, out=(x, torch.empty(18, dtype=torch.long))),
    lambda x: torch._foreach_add_([x], 1),
    lambda x: x.chunk(3)[1].fill_(2),
    lambda x: x.view(2, 9).unbind(0)[1].fill_(2),
    lambda x: x.split(6)[2].zero_(),
    lambda x: nn.init.constant_(tensor=x, val=0.5),
    lambda x: nn.init.normal_(x),
    into_numpy,
]


@pytest.mark.parametrize("mode", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 8}}])
def test_what_is_written_to_a_piece_holds(mode: dict[str, Any]) -> None:
    def body(engine: Any, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        weight = engine.module.embed.weight
        pairs = []
        for number, write in enumerate(WRITES):
            piece = weight.ds_tensor
            with torch.no_grad():
                write(piece)
            wrote = piece.detach().clone()
            if number % 2 == 0:
                engine(*batch(rank))
            else:
                with deepspeed.zero.GatheredParameters([weight]):
                    assert torch.equal(weight.detach().view(-1)[18 * rank : 18 * rank + 17], wrote[:17])
            pairs.append((wrote, deepspeed.utils.safe_get_full_fp32_param(weight)))
            del piece, wrote
        engine.backward(engine(*batch(rank)))
        engine.step()
        assert engine.ds_lent_pieces == [] and weight._ds_state.lent is None
        moved = deepspeed.utils.safe_get_full_fp32_param(weight) - pairs[-1][1]
        assert 0 < float(moved.abs().max()) < 0.5
        return pairs

    for (first, whole), (second, same) in zip(*on_ranks(body, **mode), strict=True):
        assert torch.equal(whole, same)
        assert torch.equal(torch.cat([first, second])[:35].float(), whole.view(-1))


ON_ONE_RANK: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "in place": lambda x, v: x.copy_(v),
    "data": lambda x, v: setattr(x, "data", v),
    "set_": lambda x, v: x.set_(v),
    "vector_to_parameters": lambda x, v: nn.utils.vector_to_parameters(v, [x]),
}


@pytest.mark.parametrize("mode", ["", "bf16", "fp16"])
@pytest.mark.parametrize("write", ON_ONE_RANK)
def test_what_is_written_to_the_piece_of_one_rank_holds(write: str, mode: str) -> None:
    cfg = config(3, **({mode: {"enabled": True}} if mode else {}))
    engine = deepspeed.DeepSpeedEngine(make(), cfg, group=tessera.thread_groups(1)[0])
    weight = engine.module.embed.weight
    for number in range(2):
        values = torch.full((35,), 0.5 + number, dtype=weight.dtype)
        with torch.no_grad():
            ON_ONE_RANK[write](weight.ds_tensor, values.clone())
        engine(*batch(0))
        assert torch.equal(weight.detach().view(-1), values) and torch.equal(weight.ds_tensor, values)
        assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(weight).view(-1), values.float())
        kept = weight.ds_tensor
        weight.data = torch.zeros(7, 5, dtype=weight.dtype)
        engine(*batch(0))
        assert not weight.any() and not weight.ds_tensor.any() and weight.ds_tensor is kept
        engine.backward(engine(*batch(0)))
        engine.step()
        assert torch.equal(kept, weight.detach().view(-1))
    engine.destroy()


def test_pieces_that_cannot_be_taken_over() -> None:
    """Of a parameter that is whole, and of an update before: an error on all ranks, at the next call."""

    def body(engine: Any, rank: int) -> None:
        weight = engine.module.embed.weight
        with deepspeed.zero.GatheredParameters([weight]):
            weight.ds_tensor.fill_(1)
        with pytest.raises(RuntimeError, match=r"holds whole .* modifier_rank=0"):
            engine(*batch(rank))
        piece, part = weight.ds_tensor, weight.ds_tensor.view(2, 9)[1]
        values = piece.tolist()
        engine.backward(engine(*batch(rank)))
        engine.step()
        assert piece.tolist() == values and weight.ds_tensor is piece and piece.tolist() != values
        del piece
        engine.backward(engine(*batch(rank)))
        engine.step()
        if rank == 0:
            part.zero_()
        with pytest.raises(RuntimeError, match="read before an update"):
            engine(*batch(rank))
        assert engine(*batch(rank)).isfinite() and engine.global_steps == 2

    on_ranks(body)


def init_by_pieces(rank: int, port: int, dtype: str) -> None:
    """As clients initialize partitions, before there is an engine."""
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    cfg = config(3, **({dtype: {"enabled": True}} if dtype else {}))
    with deepspeed.zero.Init(config_dict_or_path=cfg):
        model = Net()
    torch.manual_seed(rank)
    wrote = {}
    for name, param in model.named_parameters():
        nn.init.normal_(param.ds_tensor, std=0.3)
        torch.distributed.all_reduce(param.ds_tensor)
        wrote[name] = torch.empty(WORLD * param.partition_numel(), dtype=param.dtype)
        torch.distributed.all_gather_into_tensor(wrote[name], param.ds_tensor)
    engine, *_ = deepspeed.initialize(model=model, config=cfg)
    for name, param in model.named_parameters():
        whole = deepspeed.utils.safe_get_full_fp32_param(param)
        assert torch.equal(whole.view(-1), wrote[name][: param.ds_numel].float())
    engine.backward(engine(*batch(rank)))
    engine.step()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", ["", "bf16", "fp16"])
def test_a_client_that_initializes_pieces(dtype: str) -> None:
    run_processes(WORLD, init_by_pieces, free_port(), dtype)


def test_trains_with_them_and_gives_the_class_back() -> None:
    def body(engine: Any, rank: int) -> list[Any]:
        params = list(engine.module.parameters())
        for k in range(2):
            loss = engine(*batch(k))
            loss.backward()
            assert all(p.numel() == 0 for p in params)
            engine.step()
        with deepspeed.zero.GatheredParameters(params):
            assert all(p.shape == p.ds_shape for p in params)
            copied = copy.deepcopy(engine.module)
            pickled = pickle.loads(pickle.dumps(engine.module.gain))
        assert all(p.numel() > 0 for p in copied.parameters()) and pickled.shape == (1,)
        assert copied(*batch(0)).isfinite()
        engine.destroy()
        assert all(type(p) is nn.Parameter and not hasattr(p, "ds_id") for p in params)
        return [loss.item()]

    on_ranks(body)


def test_stages_below_3_have_none() -> None:
    engine, *_ = deepspeed.initialize(model=make(), config=config(2))
    assert not any(hasattr(p, "ds_id") for p in engine.parameters())


def test_init_marks_what_it_holds() -> None:
    class Special(nn.Parameter): ...

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.special = Special(torch.ones(3))

    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 1, "bf16": {"enabled": True}}):
        model = Model()
    for param in model.parameters():
        assert param.dtype is torch.bfloat16 and hasattr(param, "ds_id") and isinstance(param, nn.Parameter)
    assert isinstance(model.special, Special)
    engine, *_ = deepspeed.initialize(model=model, config={**config(3), "bf16": {"enabled": True}})
    engine.destroy()
    assert type(model.special) is Special
    with deepspeed.zero.Init(enabled=False):
        assert not hasattr(nn.Linear(2, 2).weight, "ds_id")
    with pytest.raises(tessera.ConfigError, match="config_dict_or_path"):
        deepspeed.zero.Init(config={}, config_dict_or_path={})
    with pytest.raises(NotImplementedError, match="zero_quantized_weights"):
        deepspeed.zero.Init(remote_device="nvme", zero_quantized_weights=True)
    mpu = types.SimpleNamespace(get_data_parallel_group=lambda: tessera.thread_groups(1)[0])
    with deepspeed.zero.Init(dtype=torch.bfloat16, mpu=mpu):
        assert nn.Linear(2, 2).weight.dtype is torch.bfloat16


@pytest.mark.parametrize("constructor", ["arange", "empty", "ones"])
def test_wrapped_constructors_give_the_dtype_to_floats_only(constructor: str) -> None:
    wrapped = zero_wrapper_for_fp_tensor_constructor(getattr(torch, constructor), torch.bfloat16)
    assert wrapped(4, dtype=torch.float32).dtype is torch.bfloat16
    assert wrapped(4, dtype=torch.int64).dtype is torch.int64


def test_generation_needs_no_hooks_removed() -> None:
    def body(engine: Any, rank: int) -> None:
        with deepspeed.zero.unwrap_model_for_generation(engine) as module:
            offload = engine.optimizer.parameter_offload
            for hook in offload.forward_hooks + offload.backward_hooks:
                hook.remove()
            with torch.no_grad():
                assert module(*batch(0)).isfinite()
            offload._register_deepspeed_module(offload.module)
        assert all(p.numel() == 0 for p in engine.parameters())

    on_ranks(body)


class Replayed(Net):
    """Blocks that are computed again in the backward."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_recomputation_does_not_see_the_empty_shape() -> None:
    """Frozen weights are saved by the graph, whose shapes torch compares when it computes a block again."""
    for frozen in ("norm", "linear"):
        model = make(Replayed)
        for block in model.blocks:
            getattr(block, frozen).requires_grad_(False)
        copies = [copy.deepcopy(model) for _ in range(WORLD)]

        def run(rank: int, group: Any, copies: list[Any] = copies) -> None:
            engine = deepspeed.DeepSpeedEngine(copies[rank], config(3), group=group)
            for step in range(2):
                engine(*batch(step)).backward()
                engine.step()
            engine.destroy()

        run_ranks(WORLD, run)


class Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(torch.relu(self.up(self.norm(x))))).square().mean()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Cut() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x) for layer in self.layers)


def around_init(rank: int, port: int, folder: str) -> None:
    """initialize inside zero.Init; a model of zero.Init that is cut; values loaded into a gather for reading."""
    from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint

    deepspeed.init_distributed("gloo", verbose=False, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        engine, *_ = deepspeed.initialize(model=make(), config=config(3))
    engine(*batch(0)).backward()
    engine.step()
    engine.save_checkpoint(folder)
    want = {name: value.clone() for name, value in engine.module_state_dict().items()}
    for region in (contextlib.nullcontext, deepspeed.zero.GatheredParameters):
        for modifier in (None, 0) if region is not contextlib.nullcontext else (None,):
            engine(*batch(1)).backward()
            engine.step()
            assert not torch.equal(engine.module_state_dict()["head.weight"], want["head.weight"])
            params = list(engine.module.parameters())
            with region() if region is contextlib.nullcontext else region(params, modifier_rank=modifier):
                load_state_dict_from_zero_checkpoint(engine.module, folder)
            found = engine.module_state_dict()
            assert all(torch.equal(found[name], value) for name, value in want.items())
    engine.destroy()
    for rules in ({}, {"partition_config": {"layer_specs": SPECS}}):
        cfg = config(3, tensor_parallel={"autotp_size": 2, **rules})
        with deepspeed.zero.Init(config_dict_or_path=cfg):
            model = Blocks()
        engine, *_ = deepspeed.initialize(model=model, config=cfg)
        assert engine.module.layers[0].up.out_features == 4
        engine(torch.ones(2, 6)).backward()
        engine.step()
        engine.destroy()


SPECS = [{"patterns": [".*up"], "partition_type": "column"}, {"patterns": [".*down"], "partition_type": "row"}]


def test_around_init(tmp_path: Path) -> None:
    run_processes(WORLD, around_init, free_port(), str(tmp_path))


def test_a_copy_is_whole_and_plain() -> None:
    whole = make().embed.weight.detach()

    def body(engine: Any, rank: int) -> None:
        made = copy.deepcopy(engine.module).embed.weight
        assert type(made) is nn.Parameter and made.shape == (7, 5) and torch.equal(made, whole)
        assert engine.module.embed.weight.shape == (0,)

    on_ranks(body)
