"""Several engines as parts of one model: one norm for all, skipped together; any number of forwards outstanding, on
the same ranks or on others, against plain PyTorch."""

from __future__ import annotations

import copy
import math
import queue
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import Net, assert_close, batch, config, engines, free_port, make, mse, run_processes, run_ranks, weights
from torch import nn

import tessera

CLIP = 0.05
STEPS = 2
MICRO = 3
ORDER = (2, 0, 1)  # of the backwards


class First(nn.Module):
    """Makes what Net takes."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(5, 9)
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(2))
        self.out = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lift(x.to(self.lift.weight.dtype))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.out(x)


def section(stage: int, dtype: str, **more: Any) -> dict[str, Any]:
    cfg = config(stage, accumulation=MICRO, gradient_clipping=CLIP, **more)
    if dtype == "fp16":
        return cfg | {"fp16": {"enabled": True, "initial_scale_power": 8}}
    return cfg | {"bf16": {"enabled": dtype == "bf16"}}


def data(rank: int, step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(100 * rank + 10 * step + micro)


def plain(first: nn.Module, second: nn.Module, world: int) -> tuple[list[float], nn.Module, nn.Module]:
    """Both in one process: the norms and the models afterwards. The first by SGD, the second by AdamW."""
    first, second = copy.deepcopy(first), copy.deepcopy(second)
    sgd = torch.optim.SGD(first.parameters(), lr=0.1)
    adam = torch.optim.AdamW(second.parameters(), lr=0.01)
    norms = []
    for step in range(STEPS):
        for rank in range(world):
            for micro in range(MICRO):
                x, y = data(rank, step, micro)
                (mse(second(first(x)), y) / (MICRO * world)).backward()
        both = [*first.parameters(), *second.parameters()]
        norms.append(float(nn.utils.clip_grad_norm_(both, CLIP)))
        for optimizer in (sgd, adam):
            optimizer.step()
            optimizer.zero_grad()
    return norms, first, second


ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}}


def check(norms: list[float], models: list[nn.Module], expected: Any, low: bool) -> None:
    wanted, *plain_models = expected
    assert norms == pytest.approx(wanted, rel=0.05 if low else 1e-4)
    for model, reference in zip(models, plain_models, strict=True):
        assert_close(weights(model), weights(reference), bf16=low)


@pytest.mark.parametrize("stages", [(0, 2), (1, 3), (2, 0), (3, 1)])
@pytest.mark.parametrize("dtypes", [("fp32", "fp32"), ("bf16", "fp32"), ("fp32", "bf16")])
def test_two_engines_of_the_same_ranks(stages: tuple[int, int], dtypes: tuple[str, str]) -> None:
    first, second = make(First), make(Net)
    expected = plain(first, second, 2)
    copies = [(copy.deepcopy(first), copy.deepcopy(second)) for _ in range(2)]
    others = tessera.thread_groups(2)

    def body(rank: int, group: tessera.Group) -> None:
        a = tessera.Engine(copies[rank][0], section(stages[0], dtypes[0]), group=group)
        b = tessera.Engine(copies[rank][1], section(stages[1], dtypes[1], **ADAMW), group=others[rank])
        norms = []
        for step in range(STEPS):
            batches = [data(rank, step, micro) for micro in range(MICRO)]
            losses = [mse(b(a(x)), y) for x, y in batches]
            for micro in ORDER:
                losses[micro].backward()
                norms.append(tessera.step_together([a, b]))
        assert [norm for norm in norms if norm is None] == [None] * (STEPS * (MICRO - 1))
        check([norm for norm in norms if norm is not None], list(copies[rank]), expected, "bf16" in dtypes)
        assert a.global_grad_norm() == b.global_grad_norm() == norms[-1]
        a.destroy()
        b.destroy()

    run_ranks(2, body)


def split_program(
    rank: int, engine: tessera.Engine, group: Any, send: Any, receive: Any, steps: int = STEPS
) -> list[float]:
    """Ranks 0 and 1 have the first model, 2 and 3 the second; all forwards of a step come before its backwards."""
    norms = []
    for step in range(steps):
        if rank < 2:
            outputs = [engine(data(rank, step, micro)[0]) for micro in range(MICRO)]
            for output in outputs:
                send(rank + 2, output.detach().float())
        else:
            leaves = [receive(rank - 2).requires_grad_() for _ in range(MICRO)]
            losses = [mse(engine(leaf), data(rank - 2, step, k)[1]) for k, leaf in enumerate(leaves)]
        for micro in ORDER:
            if rank < 2:
                outputs[micro].backward(receive(rank + 2).to(outputs[micro].dtype))
            else:
                losses[micro].backward()
                send(rank - 2, leaves[micro].grad)
            norm = tessera.step_together(engine, group)
            norms += [] if norm is None else [norm]
    return norms


@pytest.mark.parametrize("stages", [(0, 2), (1, 3), (3, 1)])
@pytest.mark.parametrize("dtypes", [("fp32", "fp32"), ("bf16", "fp32")])
def test_two_engines_on_different_ranks(stages: tuple[int, int], dtypes: tuple[str, str]) -> None:
    models = [make(First), make(Net)]
    expected = plain(*models, 2)
    own = [copy.deepcopy(models[rank // 2]) for rank in range(4)]
    halves = [*tessera.thread_groups(2), *tessera.thread_groups(2)]
    wires: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {
        (a, b): queue.Queue() for a, b in ((0, 2), (2, 0), (1, 3), (3, 1))
    }

    def body(rank: int, group: tessera.Group) -> list[float]:
        part = rank // 2
        cfg = section(stages[part], dtypes[part], **(ADAMW if part else {}))
        engine = tessera.Engine(own[rank], cfg, group=halves[rank])
        norms = split_program(
            rank,
            engine,
            group,
            lambda to, tensor: wires[rank, to].put(tensor.clone()),
            lambda source: wires[source, rank].get(timeout=60),
        )
        found = weights(engine.module)
        assert_close(found, weights(expected[1 + part]), bf16="bf16" in dtypes)
        engine.destroy()
        return norms

    results = run_ranks(4, body)
    assert all(norms == results[0] for norms in results)
    assert results[0] == pytest.approx(expected[0], rel=0.05 if "bf16" in dtypes else 1e-4)


def process(rank: int, port: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    models = [make(First), make(Net)]
    norms, *expected = plain(*models, 2)
    part = rank // 2
    engine = tessera.Engine(models[part], section(1 + part, "fp32", **(ADAMW if part else {})), group=groups[part])

    def receive(source: int) -> torch.Tensor:
        tensor = torch.empty(4, 5)
        dist.recv(tensor, source)
        return tensor

    found = split_program(
        rank, engine, dist.group.WORLD, lambda to, tensor: dist.send(tensor.contiguous(), to), receive
    )
    assert found == pytest.approx(norms, rel=1e-4)
    assert_close(weights(engine.module), weights(expected[part]))
    engine.destroy()
    dist.destroy_process_group()


def test_two_engines_in_different_processes() -> None:
    run_processes(4, process, free_port())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_contributions_add_up_to_the_norm(stage: int, bf16: bool) -> None:
    def body(engine: tessera.Engine, rank: int) -> tuple[float, float]:
        engine(*batch(rank)).backward()
        return engine.norm_contribution(), engine.grad_norm()

    results = engines(make(), 2, config(stage, bf16=bf16), body)
    assert math.sqrt(sum(part for part, _ in results)) == pytest.approx(results[0][1], rel=1e-12)
    assert all(part > 0 for part, _ in results), "every rank has a part"


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("dtypes", [("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "bf16")])
def test_an_overflow_in_one_engine_skips_all(dtypes: tuple[str, str], where: int) -> None:
    groups = [tessera.thread_groups(2) for _ in range(2)]

    def body(rank: int, whole: tessera.Group) -> None:
        both = [
            tessera.Engine(make(Net), section(stage, dtype) | {"gradient_accumulation_steps": 1}, group=group[rank])
            for stage, dtype, group in zip((1, 2), dtypes, groups, strict=True)
        ]
        before = [weights(engine.module) for engine in both]
        scales = [engine.loss_scaler.loss_scale for engine in both]
        for poisoned in (True, False):
            for number, engine in enumerate(both):
                loss = engine(*batch(rank))
                engine.backward(loss * math.inf if poisoned and number == where and rank == 1 else loss)
            norm = tessera.step_together(both, whole)
            assert norm is not None and math.isfinite(norm) is not poisoned
            for engine, old, scale in zip(both, before, scales, strict=True):
                assert engine.was_step_applied() is not poisoned and engine.skipped_steps == 1
                same = all(torch.equal(old[name], value) for name, value in weights(engine.module).items())
                assert same is poisoned
                needs = engine.config.get("fp16.enabled")
                assert engine.loss_scaler.loss_scale <= scale and (needs or scale == 1)
        assert len({engine.loss_scaler.loss_scale for engine in both if engine.config.get("fp16.enabled")}) <= 1
        for engine in both:
            engine.destroy()

    run_ranks(2, body)


def test_a_wrong_norm_is_refused_and_counts_nothing() -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        engine(*batch(rank)).backward()
        with pytest.raises(ValueError, match="no accumulation boundary"):
            engine.step(global_norm=1.0)
        engine.step()
        engine(*batch(rank)).backward()
        for wrong, words in ((-1.0, "must not be negative"), (1.0 + rank, "different norms")):
            with pytest.raises(ValueError, match=words):
                engine.step(global_norm=wrong)
        with pytest.raises(ValueError, match="different norms"):
            engine.step(global_norm=2.0 if rank else None)
        assert engine.micro_steps == 1 and engine.global_steps == 0
        engine.step(global_norm=3.0)
        assert engine.was_step_applied() and engine.global_grad_norm() == 3.0

    engines(make(), 2, config(1, accumulation=2), body)


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_skips_in_every_precision(norm: float) -> None:
    engine = tessera.Engine(make(), config())
    before = weights(engine.module)
    engine(*batch(0)).backward()
    engine.step(global_norm=norm)
    assert engine.skipped_steps == 1 and not engine.was_step_applied()
    assert_close(weights(engine.module), before)
    engine.destroy()


@pytest.mark.parametrize("across", [False, True])
def test_engines_that_were_stepped_apart_are_an_error_on_all_ranks(across: bool) -> None:
    def body(rank: int, whole: tessera.Group) -> None:
        count = 1 if across else 2
        mine = [tessera.Engine(make(), config(accumulation=2), group=tessera.single_group()) for _ in range(count)]
        for engine in mine:
            engine(*batch(rank)).backward()
        if rank == 0 or not across:
            mine[-1].step()
        with pytest.raises(tessera.UsageError, match=r"stepped apart: .*rank 0: (both|boundary)"):
            tessera.step_together(mine, whole)
        assert sum(engine.micro_steps for engine in mine) == (1 if rank == 0 or not across else 0)
        for engine in mine:
            engine.destroy()

    run_ranks(2, body)


@pytest.mark.parametrize("stage", range(4))
def test_engines_that_one_rank_alone_stepped_apart_are_an_error_there_at_once(stage: int) -> None:
    def body(rank: int, everyone: tessera.Group) -> None:
        mine = [tessera.Engine(make(), config(stage, accumulation=2), group=groups[rank]) for groups in halves]
        for engine in mine:
            engine(*batch(rank)).backward()
        if rank == 1:
            mine[0].step()
            with pytest.raises(tessera.UsageError, match=r"stepped apart: .*rank 0: both"):
                tessera.step_together(mine)
        else:
            tessera.step_together(mine)
        assert [engine.global_steps for engine in mine] == [0, 0]

    halves = [tessera.thread_groups(2) for _ in range(2)]
    run_ranks(2, body)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_joins_on_some_ranks_of_one_engine_is_an_error_on_all(stage: int) -> None:
    """Two engines on two ranks each. Nobody waits for the ranks of the other one.
    Saves and loads: pipeline/test_pipeline_errors.py."""
    halves = [*tessera.thread_groups(2), *tessera.thread_groups(2)]
    models: list[Any] = [make(Net), make(First)]

    def body(rank: int, everyone: tessera.Group) -> None:
        model = copy.deepcopy(models[rank // 2])
        late = model.head if rank < 2 else model.out
        late.requires_grad_(False)
        engine = tessera.Engine(model, config(stage), group=halves[rank])
        late.requires_grad_(rank > 0)
        engine(batch(rank)[0]).square().mean().backward()
        begun = time.monotonic()
        with pytest.raises(
            (tessera.ConfigError, tessera.UsageError),
            match=r"do not train the same|do not step alike|no engine was stepped: the norm failed on",
        ):
            tessera.step_together(engine, everyone)
        assert time.monotonic() - begun < 20 and engine.global_steps == 0
        late.requires_grad_(True)
        engine.zero_grad()
        engine(batch(rank)[0]).square().mean().backward()
        assert tessera.step_together(engine, everyone) > 0 and engine.global_steps == 1
        engine.destroy()

    run_ranks(4, body)


def spoil_rate(engine: Any) -> Callable[[], None]:
    group = engine.optimizer.param_groups[0]
    group["lr"] = 0.3
    return lambda: group.update(lr=0.1)


def spoil_kind(engine: Any) -> Callable[[], None]:
    group = engine.optimizer.param_groups[0]
    group["lr"] = "fast"
    return lambda: group.update(lr=0.1)


def spoil_params(engine: Any) -> Callable[[], None]:
    listed = engine.optimizer.param_groups[0]["params"]
    last = listed.pop()
    return lambda: listed.append(last)


def spoil_call(engine: Any) -> Callable[[], None]:
    region = engine.no_sync()
    region.__enter__()
    return lambda: region.__exit__(None, None, None)


def spoil_weight(engine: Any) -> Callable[[], None]:
    layer = engine.module.head
    old = layer.weight
    layer.weight = nn.Parameter(torch.zeros(3, 7))
    return lambda: setattr(layer, "weight", old)


SPOILS = [spoil_rate, spoil_kind, spoil_params, spoil_call, spoil_weight]


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("layout", ["the same ranks", "the same ranks, over a group", "others", "one rank"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_one_rank_of_one_engine_cannot_step_alike(stage: int, layout: str, spoil: Any) -> None:
    """An error on all ranks of all engines in bounded time, with nothing stepped or counted; they go on."""
    apart, alone = layout == "others", layout == "one rank"
    size = 1 if alone else 2
    groups = [tessera.thread_groups(size) for _ in range(2)]
    models: list[Any] = [make(Net), make(Net)]

    def body(rank: int, everyone: tessera.Group) -> None:
        numbers = [rank // 2] if apart else [0, 1]
        both = [
            tessera.Engine(copy.deepcopy(models[n]), config(stage, 2), group=groups[n][rank % size]) for n in numbers
        ]
        group = everyone if apart or layout.endswith("group") else None
        for k in range(4):
            for engine in both:
                engine(*batch(10 * rank + k)).backward()
            if k < 3:
                tessera.step_together(both, group)
        before = [weights(engine.module) for engine in both] if stage < 3 else []
        odd = alone or rank == (3 if apart else 1)
        mend = spoil(both[-1]) if odd else lambda: None
        begun = time.monotonic()
        if not (alone and spoil is spoil_rate):
            with pytest.raises((ValueError, TypeError, tessera.UsageError)) as refused:
                tessera.step_together(both, group)
            told = "no engine was stepped" if apart and rank < 2 else "."
            assert re.search(told, str(refused.value)) and time.monotonic() - begun < 20
        mend()
        for engine, old in zip(both, before, strict=False):
            assert all(torch.equal(value, old[name]) for name, value in weights(engine.module).items())
        assert [(engine.global_steps, engine.micro_steps) for engine in both] == [(1, 3)] * len(both)
        assert tessera.step_together(both, group) is not None
        assert all(engine.global_steps == 2 for engine in both)
        for engine in both:
            engine.destroy()

    run_ranks(4 if apart else size, body)


@pytest.mark.parametrize("over_group", [False, True])
def test_parameters_in_use_in_one_engine_keep_all_from_their_step(over_group: bool) -> None:
    groups = [tessera.thread_groups(2) for _ in range(2)]

    def body(rank: int, everyone: tessera.Group) -> None:
        both = [tessera.Engine(make(Net), config(3), group=group[rank]) for group in groups]
        for engine in both:
            engine(*batch(rank)).backward()
        group = everyone if over_group else None
        region = tessera.zero.GatheredParameters(list(both[1].module.parameters()))
        with region, pytest.raises(tessera.UsageError, match="in use"):
            tessera.step_together(both, group)
        assert [engine.global_steps for engine in both] == [0, 0]
        tessera.step_together(both, group)
        assert [engine.global_steps for engine in both] == [1, 1]
        for engine in both:
            engine.destroy()

    run_ranks(2, body)


def test_wrong_arguments() -> None:
    engine = tessera.Engine(make(), config())
    with pytest.raises(tessera.ConfigError, match="named twice"):
        tessera.step_together([engine, engine])
    with pytest.raises(tessera.ConfigError, match="no engines"):
        tessera.step_together([])
    engine.destroy()
    with pytest.raises(tessera.UsageError, match="destroyed"):
        tessera.step_together(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("names", [["head.weight"], ["embed.weight", "blocks.0.linear.bias", "gain"]])
def test_copies_do_not_count(stage: int, names: list[str]) -> None:
    model = make()
    for rank in range(2):
        (model(*batch(rank)) / 2).backward()
    counted = [param.grad for name, param in model.named_parameters() if name not in names]
    expected = float(torch.stack([grad.square().sum() for grad in counted if grad is not None]).sum())

    def body(engine: tessera.Engine, rank: int) -> float:
        engine(*batch(rank)).backward()
        return engine.norm_contribution([engine.module.get_parameter(name) for name in names])

    assert sum(engines(make(), 2, config(stage), body)) == pytest.approx(expected, rel=1e-5)
