"""Which optimizers go with offload and 16-bit states, their classes by their old names, and sums in place of means."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from deepspeed.runtime.zero.muon.original_muon import Muon
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from deepspeed.utils import safe_get_full_grad
from support import batch, config, make, run, run_ranks, weights

import tessera

CPU = {"offload_optimizer": {"device": "cpu"}}
ADAM = {"type": "Adam", "params": {"lr": 0.01}}
MASTERS: dict[str, Any] = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
LOW = {"bf16": {**MASTERS["bf16"], "bf16_optimizer_states": True}}
FP16 = {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True, "initial_scale_power": 4}}
ANY: dict[str, Any] = {"zero_force_ds_cpu_optimizer": False}


def low(params: Any) -> Any:
    return DeepSpeedCPUAdam(params, lr=0.01, fp32_optimizer_states=False)


def built(stage: int, optimizer: Any, away: bool = True, **more: Any) -> Any:
    cfg = {**config(stage, more.pop("accumulation", 1)), **more}
    cfg["zero_optimization"].update(CPU if away else {})
    if isinstance(optimizer, dict):
        cfg["optimizer"], optimizer = optimizer, None
    return deepspeed.initialize(model=make(), optimizer=optimizer, config=cfg)[0]


SERVED = {
    "fp32": (DeepSpeedCPUAdam, {}, torch.float32),
    "fp32, low": (low, {}, torch.float32),
    "bf16": (low, {"bf16": {"enabled": True}}, torch.float32),
    "Lion": (DeepSpeedCPULion, {}, torch.float32),
    "any": (torch.optim.AdamW, ANY, torch.float32),
    "masters": (DeepSpeedCPUAdam, MASTERS, torch.float32),
    "masters and states": (low, LOW, torch.bfloat16),
    "masters and states, configured": (ADAM, LOW, torch.bfloat16),
    "masters and states, told": ({**ADAM, "params": {"fp32_optimizer_states": False}}, LOW, torch.bfloat16),
    "fp16 masters": (DeepSpeedCPUAdam, FP16, torch.float32),
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", SERVED)
def test_what_goes_with_offload(name: str, stage: int) -> None:
    optimizer, more, dtype = SERVED[name]
    engine = built(stage, optimizer, **more)
    for k in range(2):
        engine.backward(engine(*batch(k)))
        engine.step()
    state = engine.optimizer.state[engine.module.head.weight]
    moments = [value for key, value in state.items() if key.startswith("exp_avg")]
    assert moments and {value.dtype for value in moments} == {dtype}
    assert engine.was_step_applied()
    engine.destroy()


WRONG = {
    "of torch": (torch.optim.AdamW, {}, ZeRORuntimeException, r'"zero_force_ds_cpu_optimizer": false'),
    "of a device": (FusedAdam, {}, ZeRORuntimeException, "DeepSpeedCPUAdam"),
    "fp32 moments": (DeepSpeedCPUAdam, LOW, AssertionError, "fp32_optimizer_states=False"),
    "masters, of torch": (torch.optim.AdamW, {**MASTERS, **ANY}, AssertionError, "needs DeepSpeedCPUAdam, got AdamW"),
    "masters, configured": ({"type": "Lion"}, LOW, AssertionError, "needs DeepSpeedCPUAdam"),
    "fp16 masters": (DeepSpeedCPULion, FP16, AssertionError, "needs DeepSpeedCPUAdam"),
    "moments of masters": (low, MASTERS, NotImplementedError, r"bf16\.bf16_optimizer_states"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_go_with_offload(name: str) -> None:
    optimizer, more, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        built(2, optimizer, **more)


CLASSES = [
    (ADAM, False, FusedAdam),
    (ADAM, True, DeepSpeedCPUAdam),
    ({"type": "AdamW", "params": {"torch_adam": True}}, True, torch.optim.AdamW),
    ({"type": "Lion"}, False, FusedLion),
    ({"type": "Lion"}, True, DeepSpeedCPULion),
    ({"type": "Lamb"}, False, FusedLamb),
    ({"type": "Muon"}, False, MuonWithAuxAdam),
]


@pytest.mark.parametrize(("optimizer", "away", "cls"), CLASSES)
def test_configured_optimizers_have_their_classes(optimizer: dict[str, Any], away: bool, cls: type) -> None:
    engine = built(1, optimizer, away)
    assert type(engine.optimizer.optimizer) is cls and engine.client_optimizer is None
    run(engine, 0, 1)
    engine.destroy()


def test_muon_by_its_old_names() -> None:
    matrices, vectors = (make(torch.nn.Linear, 4, 4).weight for _ in range(2)), [make(torch.nn.Linear, 4, 4).bias]
    groups = [{"params": list(matrices), "use_muon": True, "lr": 0.1}, {"params": vectors, "use_muon": False}]
    optimizer = MuonWithAuxAdam(groups, adam_optimizer=FusedAdam, adam_optimizer_kwargs={"weight_decay": 0.5})
    first, second = optimizer.param_groups
    assert (first["lr"], second["lr"], second["betas"], second["weight_decay"]) == (0.1, 3e-4, (0.9, 0.95), 0.5)
    with pytest.raises(AssertionError, match="use_muon"):
        MuonWithAuxAdam([{"params": vectors}])
    assert Muon([make(torch.nn.Linear, 2, 2).weight], 0.1, 0.2, 0.3).param_groups[0]["momentum"] == 0.3


@pytest.mark.parametrize("bf16", [False, True])
def test_gradients_are_summed_where_gradient_average_is_switched_off(bf16: bool) -> None:
    models = [[make() for _ in range(2)] for _ in range(2)]

    def body(rank: int, group: Any) -> Any:
        found = []
        for model, more in zip(models[rank], ({}, {"gradient_allreduce_op": "sum"}), strict=True):
            engine = deepspeed.DeepSpeedEngine(model, config(0, accumulation=2, bf16=bf16, **more), group=group)
            assert engine.gradient_average is not bool(more)
            engine.gradient_average = False
            assert engine.gradient_average is False
            run(engine, rank, 4)
            found.append(weights(engine.module))
            engine.destroy()
        return found

    for switched, configured in run_ranks(2, body):
        for name, value in configured.items():
            torch.testing.assert_close(switched[name], value)


def test_a_step_that_fails_sums_no_gradients_twice() -> None:
    models = [[make() for _ in range(2)] for _ in range(2)]

    def refuse(*_: Any) -> None:
        raise ArithmeticError("not now")

    def body(rank: int, group: Any) -> Any:
        found = []
        for model, fails in zip(models[rank], (False, True), strict=True):
            engine = deepspeed.DeepSpeedEngine(model, config(0), group=group)
            engine.gradient_average = False
            x, y = batch(rank)
            engine.backward(((engine(x) - y) ** 2).mean())
            if fails:
                handle = engine.optimizer.register_step_pre_hook(refuse)
                with pytest.raises(ArithmeticError, match="not now"):
                    engine.step()
                handle.remove()
            engine.step()
            found.append(weights(engine.module))
            engine.destroy()
        return found

    for usual, again in run_ranks(2, body):
        for name, value in usual.items():
            torch.testing.assert_close(again[name], value)


@pytest.mark.parametrize("fp16", [False, True])
def test_a_step_that_fails_leaves_gradients_bit_for_bit(fp16: bool) -> None:
    """Of 3 ranks, whose share is no float; in fp16 the sum of their gradients is none either."""
    models = [make() for _ in range(3)]

    def body(rank: int, group: Any) -> Any:
        more = {"fp16": {"enabled": True, "initial_scale_power": 0}} if fp16 else {}
        engine = deepspeed.DeepSpeedEngine(models[rank], config(0, **more), group=group)
        engine.gradient_average = False
        # The gradient of the head's bias is the factor times 4 rows times the gain, 1.5.
        engine.backward(engine(batch(rank)[0]).float().sum() * (5000 if fp16 else 0.1))
        params = list(engine.module.parameters())
        engine.tessera_engine.grad_norm()  # all have come
        before = [safe_get_full_grad(param).clone() for param in params]
        assert not fp16 or before[-1].tolist() == [30000.0] * 3
        with pytest.raises(ValueError, match="global_norm"):
            engine.tessera_engine.step(global_norm=-1.0)
        after = [safe_get_full_grad(param) for param in params]
        engine.destroy()
        return before, after

    for before, after in run_ranks(3, body):
        for value, again in zip(before, after, strict=True):
            assert torch.equal(value.nan_to_num(), again.nan_to_num())


def test_gradient_average_is_changed_at_stage_0_only() -> None:
    engine = built(1, ADAM, away=False)
    engine.gradient_average = True
    with pytest.raises(NotImplementedError, match="gradient_allreduce_op"):
        engine.gradient_average = False


@pytest.mark.parametrize(("stage", "accumulation"), [(1, 3), (2, 3), (2, 1), (3, 3)])
def test_gradients_that_offload_accumulates(stage: int, accumulation: int) -> None:
    engine = built(stage, ADAM, accumulation=accumulation)
    sums = []
    for k in range(accumulation):
        engine.backward(engine(*batch(0)))
        held = engine.optimizer.accumulated_grads_in_cpu
        sums.append(sum(float(grad.abs().sum()) for grad in held.values()))
        assert all(grad.is_cpu for grad in held.values()) and bool(held) == (accumulation > 1), k
        engine.step()
    assert sums == sorted(sums) and len(set(sums)) == accumulation
    assert engine.optimizer.accumulated_grads_in_cpu == {} or accumulation > 1
    assert built(2, ADAM, away=False).optimizer.accumulated_grads_in_cpu == {}


def test_nothing_of_it_is_in_tessera() -> None:
    engine = tessera.Engine(make(), {**config(1), "optimizer": ADAM, "zero_optimization": {"stage": 1, **CPU}})
    assert type(engine.basic_optimizer) is tessera.optim.FusedAdam
    engine = tessera.Engine(
        make(), {**config(1), "zero_optimization": {"stage": 1, **CPU}}, optimizer=torch.optim.AdamW
    )
    assert type(engine.basic_optimizer) is torch.optim.AdamW


@pytest.mark.parametrize(("mode", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_stage_0_says_its_dtype_and_scale(mode: str, dtype: torch.dtype) -> None:
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config(0) | {mode: {"enabled": True}})[0]
    found = engine.optimizer
    assert isinstance(found, FP16_UnfusedOptimizer) and isinstance(found, BF16_Optimizer) == (mode == "bf16")
    scale = found.loss_scale_config
    assert found.low_precision_dtype is dtype and scale.dynamic_loss_scale == (mode == "fp16")
    assert scale.cur_scale == (1 if mode == "bf16" else 2**16)
    engine.destroy()


@pytest.mark.parametrize("stage", range(4))
def test_what_is_thawed_or_added_is_trained(stage: int) -> None:
    model, extra = make(), torch.nn.Parameter(torch.ones(3))
    model.head.requires_grad_(False)
    cfg = {**config(stage), "optimizer": ADAM}
    engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=cfg)
    run(engine, 0, 1)
    before = weights(model)
    model.head.requires_grad_(True)
    optimizer.add_param_group({"params": [extra]})
    for k in range(2):
        engine.backward((engine(batch(k)[0]) * extra).square().mean())
        engine.step()
    after = weights(model)
    assert not any(torch.equal(after[name], value) for name, value in before.items()) and (extra != 1).all()
    assert deepspeed.utils.safe_get_full_fp32_param(model.head.weight) is not None
    engine.destroy()
