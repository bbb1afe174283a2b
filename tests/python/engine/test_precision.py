"""Precision modes by configuration: against plain PyTorch, and side by side in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import batch, config, engines, make, mse
from torch import nn

import tessera
from tessera import state

ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}
LOW = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def bf16_half_up(x: torch.Tensor) -> torch.Tensor:
    """The upper half of a split master: ties up, where torch's cast takes them to the even neighbour."""
    return (x.view(torch.int32) + 0x8000).bitwise_and(-0x10000).view(torch.float32).bfloat16()


class PlainMaster:
    """A plain loop: bf16 model, fp32 masters, and an optimizer for those."""

    def __init__(self, model: nn.Module, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        self.model = copy.deepcopy(model).bfloat16()
        self.masters = [nn.Parameter(p.detach().float()) for p in self.model.parameters()]
        self.optimizer = optimizer(self.masters, lr=1e-3, weight_decay=0.1)

    @torch.no_grad()
    def write(self) -> None:
        for param, master in zip(self.model.parameters(), self.masters, strict=True):
            param.copy_(bf16_half_up(master))

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = self.model(x, y)
        loss.backward()
        for param, master in zip(self.model.parameters(), self.masters, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        self.optimizer.step()
        self.write()
        return loss.detach()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_100_steps_of_the_exact_mode_have_the_bits_of_an_fp32_master(stage: int) -> None:
    """Both ranks have the whole batch, so their mean is its gradient. FusedAdam, outside of engines, has the kernels'
    arithmetic on fp32 tensors; torch's AdamW takes square roots that are not correctly rounded."""
    model = make(width=33, blocks=2)
    plain, by_torch = PlainMaster(model, tessera.optim.FusedAdam), PlainMaster(model)
    losses = [plain.step(*batch(step)) for step in range(100)]
    for step in range(100):
        by_torch.step(*batch(step))

    def body(engine: tessera.Engine, _: int) -> Any:
        got = []
        for step in range(100):
            loss = engine(*batch(step))
            loss.backward()
            engine.step()
            got.append(loss.detach())
        masters = [state.get_full_fp32_param(engine, p) for p in engine.module.parameters()]
        return got, masters, engine.core.memory().master

    cfg = config(stage, bf16=True, optimizer=ADAM, tessera={"min_unit_elements": 1})
    for got, masters, held in engines(model, 2, cfg, body):
        assert torch.stack(got).equal(torch.stack(losses))
        for mine, want, near in zip(masters, plain.masters, by_torch.masters, strict=True):
            assert mine.equal(want)
            torch.testing.assert_close(mine, near.detach(), rtol=1e-5, atol=1e-5)
        elements = sum(p.numel() for p in model.parameters())
        assert held < 2.4 * elements / (1 if stage == 0 else 2), (
            "two bytes an element, and the padding of small tensors"
        )


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("keys", "master", "moment"),
    [({}, 10, torch.bfloat16), ({"state_bytes": 8}, 8, torch.bfloat16), ({"rounding": "nearest"}, 8, torch.bfloat16)],
    ids=["balanced", "smallest", "nearest"],
)
def test_low_precision_states(stage: int, keys: dict[str, Any], master: int, moment: torch.dtype) -> None:
    model = make(width=33, blocks=2)
    plain = PlainMaster(model)
    for step in range(60):
        plain.step(*batch(step % 4))
    target = mse(plain.model(batch(0)[0]), batch(0)[1])

    def body(engine: tessera.Engine, _: int) -> Any:
        for step in range(60):
            engine(*batch(step % 4)).backward()
            engine.step()
        param = engine.module.head.weight
        moments = [v for k, v in engine.optimizer.state[param].items() if k.startswith("exp_avg")]
        assert all(value.dtype == moment for value in moments)
        assert state.get_full_optimizer_state(engine, param, "exp_avg").dtype == torch.float32
        assert state.get_local_optimizer_state(engine, param, "exp_avg").dtype == torch.float32
        assert state.get_local_fp32_param(engine, param).dtype == torch.float32
        assert engine.core.options().zero.precision.bytes_per_parameter() == master
        full = state.get_full_fp32_param(engine, param)
        in_bf16 = full.equal(full.bfloat16().float())
        assert in_bf16 == (master == 8), "a split master holds more than bf16"
        with torch.no_grad():
            return mse(engine(batch(0)[0]), batch(0)[1])

    for loss in engines(model, 2, config(stage, optimizer=ADAM, tessera=keys) | {"bf16": LOW}, body):
        assert loss == pytest.approx(target.item(), rel=0.1)


def test_engines_of_different_modes_do_not_touch_each_other() -> None:
    """Joint loss of an exact, a low-precision and an fp32 engine: each as if it were alone."""
    sections: list[dict[str, Any]] = [{"bf16": {"enabled": True}}, {"bf16": LOW}, {}]

    def train(indices: list[int]) -> dict[int, list[torch.Tensor]]:
        result: dict[int, list[torch.Tensor]] = {}
        built = {i: tessera.Engine(make(seed=i), config(1, optimizer=ADAM) | sections[i]) for i in indices}
        for step in range(5):
            x, y = batch(step)
            torch.autograd.backward([mse(engine(x), y) for engine in built.values()])
            for engine in built.values():
                engine.step()
        for i, engine in built.items():
            values = [state.get_full_fp32_param(engine, p) for p in engine.module.parameters()]
            result[i] = [value for value in values if value is not None]
            engine.destroy()
        return result

    together = train([0, 1, 2])
    for i in range(3):
        for mine, want in zip(together[i], train([i])[i], strict=True):
            assert mine.equal(want)


def test_what_needs_offload_says_so() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16_master_weights_and_grads"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_gradients": True}}, "fp16_master_weights_and_grads"),
    ]
    for section, key in cases:
        with pytest.raises(ValueError, match=rf"{key}.*offload_optimizer\.device cpu.*state_bytes 12"):
            tessera.Engine(make(), config(1) | section)
        zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
        adam = {"type": "AdamW", "params": {"lr": 0.01}}
        engine = tessera.Engine(make(), config(zero_optimization=zero, optimizer=adam) | section)
        memory = engine.core.memory()
        assert memory.master == 0 and memory.states == 4 * memory.params  # two fp32 moments beside 16-bit weights
        assert {p.element_size() for p in engine.module.parameters()} == {2}
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(None, torch.float32), ("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)],
)
def test_buffers_keep_their_dtype_unless_the_configuration_names_one(
    stage: int, name: str | None, dtype: torch.dtype
) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    norm, held = model[1], model[1].running_mean
    types = {} if name is None else {"data_types": {"buffer_dtype": name}}
    engine = tessera.Engine(model, config(stage, bf16=True) | types | {"optimizer": ADAM})
    assert norm.running_mean is held  # who holds it sees the change
    assert {param.dtype for param in engine.module.parameters()} == {torch.bfloat16}
    assert norm.running_mean.dtype == norm.running_var.dtype == dtype
    assert norm.num_batches_tracked.dtype == torch.int64
    if dtype == torch.bfloat16:  # torch's batch norm takes no other statistics beside weights in bf16
        engine(torch.randn(8, 5).bfloat16()).float().square().mean().backward()
        engine.step()
        assert norm.running_mean.abs().sum() > 0
    engine.destroy()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {"shift": torch.float32, "routed": torch.bfloat16}),  # what the model says of itself
        (["routed", "no_*_such"], {"shift": torch.bfloat16, "routed": torch.float32}),
        (["s*t$"], {"shift": torch.float32, "routed": torch.bfloat16}),
        ([], {"shift": torch.bfloat16, "routed": torch.bfloat16}),
    ],
)
def test_buffers_that_stay_in_fp32(given: list[str] | None, expected: dict[str, torch.dtype]) -> None:
    class Routing(nn.Linear):
        _keep_in_fp32_modules_strict = ("shift",)
        _keep_in_fp32_modules = ("routed",)

    model = nn.Sequential(Routing(5, 4, bias=False))
    for name in expected:
        model[0].register_buffer(name, torch.zeros(2, dtype=torch.bfloat16))  # as a loader in bf16 leaves it
    types: dict[str, Any] = {"buffer_dtype": "bf16"} | ({} if given is None else {"keep_in_fp32_modules": given})
    engine = tessera.Engine(model, config(1, bf16=True) | {"data_types": types, "optimizer": ADAM})
    assert {name: getattr(model[0], name).dtype for name in expected} == expected
    engine.destroy()
    engine = tessera.Engine(model, config(1) | {"data_types": {"keep_in_fp32_modules": given or []}, "optimizer": ADAM})
    assert {name: getattr(model[0], name).dtype for name in expected} == expected  # of 16-bit modes only
    engine.destroy()
    if given:
        with pytest.raises(ValueError, match="keep_in_fp32_modules"):
            types["keep_in_fp32_modules"] = ["("]
            tessera.Engine(model, config(1, bf16=True) | {"data_types": types, "optimizer": ADAM})


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("mode", "grad"), [("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp16"), ("fp16", "bf16"), ("fp16", "fp32")]
)
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_accumulate_in_another_dtype(world: int, mode: str, grad: str, stage: int) -> None:
    """As near the mode's own run as the dtype is fine; what a rank holds of them has that dtype."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    section = {} if mode == "fp32" else {mode: {"enabled": True} | ({"loss_scale": 8} if mode == "fp16" else {})}

    def body(engine: tessera.Engine, rank: int) -> list[float]:
        losses = []
        for k in range(6):
            loss = engine(*batch(10 * rank + k))
            engine.backward(loss)
            losses.append(loss.item())
            engine.step()
        return losses

    def run(types: dict[str, str]) -> list[float]:
        cfg = config(stage, accumulation=2, optimizer=ADAM, data_types=types, **section)

        def checked(engine: tessera.Engine, rank: int) -> list[float]:
            assert engine.core.options().zero.precision.grad == dtypes[types.get("grad_accum_dtype", mode)]
            return body(engine, rank)

        return engines(make(), world, cfg, checked)[0]

    torch.testing.assert_close(run({"grad_accum_dtype": grad}), run({}), rtol=2e-2, atol=0)
