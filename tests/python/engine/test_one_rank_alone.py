"""What one rank alone has against a step, or does more often: the others hear of it, nothing is updated or counted, and
the engines go on once it is mended. With the update in the backward, too, before it has updated anything."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import OPTIMIZERS, batch, config, make, micro, run_ranks, same_bits
from torch import nn

import tessera

Mend = Callable[[], Any]


def group_removed(engine: Any) -> Mend:
    groups = engine.basic_optimizer.param_groups
    last = groups.pop()
    return lambda: groups.append(last)


def parameter_removed(engine: Any) -> Mend:
    params = engine.basic_optimizer.param_groups[0]["params"]
    last = params.pop()
    return lambda: params.append(last)


def groups_reordered(engine: Any) -> Mend:
    engine.basic_optimizer.param_groups.reverse()
    return engine.basic_optimizer.param_groups.reverse


def parameters_exchanged(engine: Any) -> Mend:
    first, second = (group["params"] for group in engine.basic_optimizer.param_groups)

    def exchange() -> None:
        first[:], second[:] = second[:], first[:]

    exchange()
    return exchange


def rate_of(value: Any) -> Callable[[Any], Mend]:
    def broken(engine: Any) -> Mend:
        group = engine.basic_optimizer.param_groups[0]
        old, group["lr"] = group["lr"], value
        return lambda: group.update(lr=old)

    return broken


def pre_hook(engine: Any) -> Mend:
    def refuses(*_: Any) -> None:
        raise KeyError("the user's own")

    return engine.basic_optimizer.register_step_pre_hook(refuses).remove


def in_two_groups(engine: Any) -> Mend:
    second = engine.basic_optimizer.param_groups[1]["params"]
    second.append(next(engine.module.parameters()))
    return second.pop


def replaced(engine: Any) -> Mend:
    head, old = engine.module.head, engine.module.head.weight
    head.weight = nn.Parameter(torch.zeros(3, 7))
    return lambda: setattr(head, "weight", old)


def frozen(engine: Any) -> Mend:
    bias = engine.module.head.bias.requires_grad_(False)
    return lambda: bias.requires_grad_(True)


def inside_no_sync(engine: Any) -> Mend:
    stack = contextlib.ExitStack()
    stack.enter_context(engine.no_sync())
    return stack.close


# What it is, and the words for it.
NATIVE = {
    group_removed: "after the engine was built; put them back",
    parameter_removed: "after the engine was built; put them back",
    groups_reordered: "after the engine was built; put them back",
    parameters_exchanged: "after the engine was built; put them back",
    rate_of("fast"): "asks for what this engine was not built for",
    rate_of(torch.tensor(0.1)): "asks for what this engine was not built for",
    pre_hook: "the user's own",
    in_two_groups: "is in another one",
}
CLIENT = {
    group_removed: NATIVE[group_removed],
    groups_reordered: NATIVE[groups_reordered],
    parameters_exchanged: NATIVE[parameters_exchanged],
    in_two_groups: "is in another one",
}
CASES = [(None, *item) for item in NATIVE.items()] + [("rmsprop", *item) for item in CLIENT.items()]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:3]}, {"params": params[3:]}]


def build(model: nn.Module, kind: str | None, stage: int, group: Any, **more: Any) -> Any:
    cfg = config(stage, zero_allow_untested_optimizer=True, **more)
    if kind is None:
        return tessera.Engine(model, cfg, model_parameters=two_groups(model), group=group)
    return tessera.Engine(model, cfg, optimizer=OPTIMIZERS[kind](two_groups(model)), group=group)


def models(count: int) -> list[nn.Module]:
    """One a rank, made here: threads share torch's generator."""
    return [make() for _ in range(count)]


def values(engine: Any, params: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Of `params`, which the engine was built of. Collective."""
    return {name: tessera.state.get_full_fp32_param(engine, param).clone() for name, param in params.items()}


def fails(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("kind", "trouble", "words"), CASES)
def test_a_rank_that_cannot_step(kind: str | None, trouble: Any, words: str, stage: int) -> None:
    built = models(2)

    def body(rank: int, group: tessera.Group) -> str:
        engine = build(built[rank], kind, stage, group)
        params = dict(engine.module.named_parameters())
        micro(engine, rank)
        before = values(engine, params)
        mend = trouble(engine) if rank == 1 else None
        loss = engine(*batch(rank))
        loss.backward()
        text = fails(engine.step)
        assert engine.global_steps == engine.micro_steps == 1 and same_bits(values(engine, params), before)
        if mend is not None:
            mend()
        engine.step()
        assert engine.global_steps == 2 and not same_bits(values(engine, params), before)
        return text

    start = time.monotonic()
    first, second = run_ranks(2, body)
    assert time.monotonic() - start < 20
    assert re.search(f"ranks do not step alike: rank 0 has nothing that keeps it .*, rank 1 has .*{words}", first)
    assert words in second and not second.startswith("ValueError: [engine.step] ranks")


@pytest.mark.parametrize("stage", range(4))
def test_a_rank_inside_no_sync(stage: int) -> None:
    built = models(2)

    def body(rank: int, group: tessera.Group) -> None:
        engine = build(built[rank], None, stage, group)
        engine(*batch(rank)).backward()
        mend = inside_no_sync(engine) if rank == 1 else lambda: None
        with pytest.raises(ValueError, match=r"rank 1 has .* It is illegal to call Engine.step\(\) inside no_sync"):
            engine.step()
        mend()
        engine.step()
        assert engine.global_steps == 1

    run_ranks(2, body)


DIFFERENT = {
    rate_of(0.02): r"rank 0 has lr 0\.1 in param group 0, rank 1 has lr 0\.02",
    frozen: r"rank 0 has nothing, rank 1 has parameter 'head\.bias' frozen",
}
EARLY = {**NATIVE, replaced: "head.weight: replaced after the engine was built", **DIFFERENT}


@pytest.mark.parametrize("clip", ["", "unit", "previous"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("trouble", "words"), EARLY.items())
def test_the_update_in_the_backward_is_refused_before_it(
    trouble: Any, words: str, world: int, stage: int, clip: str
) -> None:
    """And what follows is as if it had not been tried."""
    own = {"update_in_backward": True} | ({"clip": clip} if clip else {})
    early = {"tessera": own, "gradient_clipping": 0.5 if clip else 0.0}

    def train(engine: Any, rank: int, tries: bool) -> dict[str, torch.Tensor]:
        params = dict(engine.module.named_parameters())
        micro(engine, rank)
        if tries:
            before = values(engine, params)
            mend = trouble(engine) if rank == world - 1 else lambda: None
            text = fails(lambda: engine(*batch(9)).backward())
            assert re.search(words, text), text
            assert same_bits(values(engine, params), before) and engine.global_steps == engine.micro_steps == 1
            mend()
        micro(engine, 5 + rank)
        assert engine.global_steps == 2
        return values(engine, params)

    def run(tries: bool) -> list[dict[str, torch.Tensor]]:
        built = models(world)
        return run_ranks(world, lambda r, g: train(build(built[r], None, stage, g, **early), r, tries))

    if world == 1 and trouble in DIFFERENT:
        return
    assert all(same_bits(a, b) for a, b in zip(run(True), run(False), strict=True))
