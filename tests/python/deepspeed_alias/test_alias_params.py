"""ds_ attributes of partitioned parameters, on two ranks (threads), and zero.Init."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, zero_wrapper_for_fp_tensor_constructor
from support import Net, batch, config, make, run_ranks
from torch import nn

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
