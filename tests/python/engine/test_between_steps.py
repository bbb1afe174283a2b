"""What a user does to a live engine's model between steps and must not be felt: the weights after it are, bit for bit,
those of a run without it, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import Net, batch, config, engines, make, mse, run_ranks, same_bits
from torch import nn

import tessera


class Images(nn.Module):
    """Weights of four dimensions, a square matrix, rows that are not a multiple of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.deep = nn.Conv2d(4, 5, 3)
        self.square = nn.Linear(5, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv(x.to(self.conv.weight.dtype)))
        return self.square(self.deep(x).mean(dim=(2, 3)))


def images(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(10 * rank + step))


def loss_of(engine: Any, rank: int, step: int) -> torch.Tensor:
    return mse(engine(images(rank, step)), torch.ones(2, 5))


def through(*dtypes: torch.dtype) -> Callable[[nn.Module], Any]:
    def convert(module: nn.Module) -> None:
        before = next(module.parameters()).dtype
        for dtype in (*dtypes, before):
            module.to(dtype)

    return convert


def replace_data(module: nn.Module) -> None:
    for param in module.parameters():
        param.data = param.data.clone()


def transpose_data(module: nn.Module) -> None:
    """The same values in another order of memory, also where the pointer stays."""
    for param in module.parameters():
        if param.dim() == 2:
            param.data = param.data.t().contiguous().t()


ACTIONS: dict[str, Callable[[nn.Module], Any]] = {
    "float and back": through(torch.float32),
    "double and back": through(torch.float64),
    "through two dtypes": through(torch.float32, torch.float64),
    "channels last": lambda module: module.to(memory_format=torch.channels_last),
    "channels last, in double": lambda module: (
        module.to(memory_format=torch.channels_last),
        through(torch.float64)(module),
    ),
    "data replaced": replace_data,
    "data transposed": transpose_data,
}


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_between_steps_is_not_felt(action: str, dtype: str, stage: int) -> None:
    cfg = config(stage, bf16=dtype == "bf16", optimizer={"type": "AdamW", "params": {"lr": 0.01}})

    def train(act: Callable[[nn.Module], Any]) -> list[Any]:
        def body(engine: tessera.Engine, rank: int) -> dict[str, torch.Tensor]:
            for step in range(4):
                loss_of(engine, rank, step).backward()
                if step == 2:
                    act(engine.module)  # between a backward and its step, too
                engine.step()
                act(engine.module)
            return {name: param.detach().clone() for name, param in engine.module.named_parameters()}

        return engines(make(Images), 2, cfg, body)

    expected = train(lambda module: None)[0]
    for got in train(ACTIONS[action]):
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert not torch.equal(expected["square.weight"], make(Images).square.weight.to(expected["square.weight"].dtype))


def clamp_by_numpy(param: torch.Tensor) -> None:
    words = param.data.detach().view(torch.int16 if param.element_size() == 2 else torch.int32).numpy()
    words[:] = torch.clamp(param.data, -0.05, 0.05).view(torch.from_numpy(words).dtype).numpy()


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "data": lambda p: p.data.clamp_(-0.05, 0.05),
    "no_grad": lambda p: p.detach().clamp_(-0.05, 0.05),
    "replaced": lambda p: setattr(p, "data", p.data.clamp(-0.05, 0.05)),
    "numpy": clamp_by_numpy,
}
MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "fp16, offload": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "fp16, client": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "bf16, client": {"bf16": {"enabled": True}},
}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_between_steps_holds(write: str, mode: str, stage: int) -> None:
    """The clipping of a critic's weights: every way to write, every mode, also of resident parameters of stage 3."""
    offload = {"offload_optimizer": {"device": "cpu"}} if "offload" in mode and stage > 0 else {}
    client = (lambda p: torch.optim.RMSprop(p, lr=1e-3)) if "client" in mode else None
    cfg = config(stage, zero=offload, zero_allow_untested_optimizer=True, **MODES[mode])
    cfg["zero_optimization"]["stage3_param_persistence_threshold"] = 1000
    if client is None:
        cfg["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}}

    def body(engine: Any, rank: int) -> None:
        for step in range(3):
            engine.backward(engine(*batch(2 * step + rank)))
            engine.step()
            assert engine.was_step_applied()
            if step > 0:  # an update from the clamped values: no further than the rate allows
                for name, param in engine.module.named_parameters():
                    assert param.detach().abs().max() <= 0.05 + 2 * 1e-3 + 1e-2 * ("client" in mode), (name, step)
            for param in engine.module.parameters():
                WRITES[write](param)
            for param in engine.module.parameters():
                master = tessera.state.get_full_fp32_param(engine, param)
                assert master.abs().max() <= 0.05 + 1e-3, step

    engines(make(Net), 2, cfg, body, client=client)


@pytest.mark.parametrize("stage", range(3))
def test_a_master_that_was_set_holds_too(stage: int) -> None:
    cfg = config(stage, fp16={"enabled": True, "initial_scale_power": 4})
    cfg["optimizer"]["params"]["lr"] = 0.0

    def body(engine: Any, rank: int) -> None:
        head, gain = engine.module.head.weight, engine.module.gain
        for step in range(2):
            engine.backward(engine(*batch(2 * step + rank)))
            value = 0.3 + step + 1e-5  # no number of fp16
            tessera.state.set_full_fp32_param(engine, head, torch.full((3, 7), value))
            gain.data.fill_(2.0 + step)
            engine.step()
            assert engine.was_step_applied()
            torch.testing.assert_close(
                tessera.state.get_full_fp32_param(engine, head), torch.full((3, 7), value), rtol=1e-7, atol=0
            )
            assert head.detach().eq(torch.tensor(value).half()).all()
            assert gain.item() == 2.0 + step

    engines(make(Net), 2, cfg, body)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_by_the_module_itself_after_a_conversion(stage: int) -> None:
    def train(converts: bool) -> Any:
        def body(engine: tessera.Engine, rank: int) -> dict[str, torch.Tensor]:
            loss_of(engine, rank, 0).backward()
            engine.step()
            if converts:
                through(torch.float64)(engine.module)
            loss_of(engine.module, rank, 1).backward()
            engine.step()
            return {name: param.detach().clone() for name, param in engine.module.named_parameters()}

        return engines(make(Images), 2, config(stage), body)[0]

    assert same_bits(train(True), train(False))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_past_the_engine_are_refused(stage: int) -> None:
    """A first register_hook() takes the engine's off, a conversion the accumulator; no forward of the engine comes."""

    def body(engine: tessera.Engine, rank: int) -> None:
        loss_of(engine, rank, 0).backward()
        engine.step()
        engine.module.square.weight.register_hook(lambda grad: grad)
        through(torch.float64)(engine.module)
        loss_of(engine.module, rank, 1).backward()
        with pytest.raises(RuntimeError, match="was converted"):
            engine.step()
        engine.zero_grad()
        loss_of(engine, rank, 1).backward()
        engine.step()
        assert engine.was_step_applied()

    engines(make(Images), 2, config(stage), body)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_model_left_in_another_dtype_is_refused_by_the_forward(stage: int) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        engine.module.double()
        with pytest.raises(RuntimeError, match=r"became a tensor of .* dtype"):
            loss_of(engine, rank, 0)
        engine.module.float()
        loss_of(engine, rank, 0).backward()
        engine.step()

    engines(make(Images), 2, config(stage), body)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_parameter_unused_on_one_rank_keeps_ranks_alike(stage: int) -> None:
    """Sums of 16-bit gradients over ranks take the same random bits everywhere."""
    cfg = config(stage, accumulation=2, bf16=True, tessera={"rounding": "stochastic"})

    def body(engine: tessera.Engine, rank: int) -> dict[str, torch.Tensor]:
        for step in range(8):
            torch.manual_seed(100 * rank + step)
            x = torch.randn(4, 5).to(torch.bfloat16)
            loss = (engine(x) if rank == 0 or step % 2 else engine.module.embed(x)).float().pow(2).mean()
            loss.backward()
            if step % 4 == 1:  # a third backward of the step
                (engine(x)).float().sum().backward()
            engine.step()
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}

    first, second = engines(make(Net), 2, cfg, body)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


class WithBuffers(Net):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((3,), float(rank)))
        self.register_buffer("counts", torch.tensor([rank, 2], dtype=torch.int64))
        self.register_buffer("flag", torch.tensor(rank == 0))
        self.register_buffer("wide", torch.full((2, 3), rank + 0.5, dtype=torch.float64).t(), persistent=False)


@pytest.mark.parametrize("shared", [True, False])
def test_buffers_start_with_rank_zeros_values(shared: bool) -> None:
    models = [WithBuffers(rank) for rank in range(2)]

    def body(rank: int, group: tessera.Group) -> dict[str, torch.Tensor]:
        cfg = config(1, **({} if shared else {"tessera": {"broadcast_buffers": False}}))
        tessera.Engine(models[rank], cfg, group=group).destroy()
        return dict(models[rank].named_buffers())

    first, second = run_ranks(2, body)
    for name, value in first.items():
        assert torch.equal(value, dict(WithBuffers(0).named_buffers())[name])
        assert torch.equal(value, second[name]) is shared, name


def test_lazy_modules_are_refused_by_name() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match=r"0\.weight.*1\.running_mean.*lazy modules have no shapes yet"):
        tessera.initialize(model=model, config=config(1))


def test_ranks_that_registered_parameters_in_another_order_are_an_error_on_all() -> None:
    """A ModuleDict made from a set: another order in every process."""

    def body(rank: int, group: tessera.Group) -> None:
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("ab" if rank == 0 else "ba")})
        with pytest.raises(ValueError, match=r"ranks build different engines.*'a\.weight'.*'b\.weight'"):
            tessera.Engine(model, config(1), group=group)

    run_ranks(2, body)


def test_clients_with_other_hyper_parameters_are_an_error_on_all() -> None:
    def body(rank: int, group: tessera.Group) -> None:
        model = make()
        client = torch.optim.RMSprop(model.parameters(), lr=0.1, alpha=0.9 + rank / 100)
        with pytest.raises(ValueError, match=r"ranks build different engines.*RMSprop"):
            tessera.Engine(model, config(0), optimizer=client, group=group)

    run_ranks(2, body)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_a_section_the_model_keeps_its_dtype(dtype: torch.dtype, stage: int) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        x, y = batch(rank)
        loss = mse(engine(x.to(dtype)), y)
        loss.backward()
        engine.step()
        assert {p.dtype for p in engine.module.parameters()} == {dtype}

    engines(make().to(dtype), 2, config(stage), body)
