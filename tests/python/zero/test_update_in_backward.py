"""tessera.update_in_backward: the bits of the usual step, for the loops of users."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest
import torch
from gradient_penalties import PENALTIES
from support import batch, config, engines, make, same_bits, weights
from torch import nn
from torch.utils.checkpoint import checkpoint

import tessera

ADAM = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 3}}


def settings(stage: int, early: bool, **more: Any) -> dict[str, Any]:
    section = {"min_unit_elements": 1, "update_in_backward": early}
    return config(stage) | {"tessera": section, "optimizer": ADAM, "scheduler": WARMUP} | more


BF16 = {"enabled": True, "check_grad_overflow": False}


def life(engine: tessera.Engine, rank: int) -> tuple[list[float], list[torch.Tensor]]:
    losses = []
    for step in range(4):
        loss = engine(*batch(10 * step + rank))
        loss.backward()
        engine.step()
        losses.append(loss.item())
        norm = engine.global_grad_norm()
        assert norm is not None
        losses.append(float(norm))
    with torch.no_grad():
        losses.append(engine(*batch(99)).item())
    params = list(engine.module.parameters())
    with tessera.zero.GatheredParameters(params):
        return losses, [param.detach().clone() for param in params]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("stage", "more"), [(1, {}), (2, {"bf16": BF16}), (3, {}), (3, {"bf16": BF16})])
def test_the_bits_of_the_usual_step(stage: int, more: dict[str, Any], world: int) -> None:
    late, early = (engines(make(), world, settings(stage, early, **more), life) for early in (False, True))
    for (losses, values), (other_losses, other_values) in zip(late, early, strict=True):
        assert losses == other_losses
        assert all(torch.equal(a, b) for a, b in zip(values, other_values, strict=True))


@pytest.mark.parametrize("form", PENALTIES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_gradients(stage: int, form: Any) -> None:
    """What torch.autograd.grad goes through is no backward of the engine's."""

    def body(engine: tessera.Engine, rank: int) -> Any:
        for _ in range(3):
            form(engine, rank).backward()
            engine.step()
        return weights(engine.module)

    late, early = (engines(make(), 2, settings(stage, early), body) for early in (False, True))
    assert all(same_bits(a, b) for a, b in zip(late, early, strict=True))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, shared: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.reentrant, self.shared = reentrant, shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_(True)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
            if self.shared:
                x = checkpoint(self.layers[0], x, use_reentrant=self.reentrant)
        return x.square().mean()


@pytest.mark.parametrize(("reentrant", "shared"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("stage", [2, 3])
def test_activation_checkpointing(stage: int, reentrant: bool, shared: bool) -> None:
    def body(engine: tessera.Engine, rank: int) -> list[float]:
        losses = []
        for step in range(3):
            loss = engine(torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank)))
            loss.backward()
            engine.step()
            losses.append(loss.item())
        return losses

    model = make(Checkpointed, reentrant, shared)
    late, early = (engines(model, 2, settings(stage, early), body) for early in (False, True))
    assert late == early


def test_shared_layers_in_reentrant_checkpoints_are_refused() -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        with pytest.raises(RuntimeError, match="checkpoint without reentry"):
            engine(torch.randn(4, 5)).backward()
        with pytest.raises(tessera.errors.IoError, match="load a checkpoint"):
            engine.step()

    engines(make(Checkpointed, True, True), 1, settings(2, True), body)


def test_a_checkpoint_mends_what_a_failed_backward_left(tmp_path: pathlib.Path) -> None:
    def fail(module: nn.Module, gradients: Any) -> None:
        raise RuntimeError("the client's hook")

    def body(engine: tessera.Engine, rank: int) -> None:
        def step() -> list[torch.Tensor]:
            engine(*batch(1)).backward()
            engine.step()
            return [param.detach().clone() for param in engine.module.parameters()]

        step()
        engine.save_checkpoint(str(tmp_path), tag="a")
        expected = step()
        embed: Any = engine.module.embed
        handle = embed.register_full_backward_pre_hook(fail)  # runs last
        with pytest.raises(RuntimeError, match="the client's hook"):
            engine(*batch(1)).backward()
        handle.remove()
        with pytest.raises(tessera.errors.IoError, match="load a checkpoint"):
            engine.step()
        engine.load_checkpoint(str(tmp_path), tag="a")
        assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))

    engines(make(), 1, settings(2, True), body)


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_failed_backward_had_handed_over_is_dropped(world: int) -> None:
    """With clipping a unit waits for its norm: the backward fails before it, or any other, is updated."""
    clip = settings(2, True, gradient_clipping=1.0)
    clip["tessera"]["clip_by_unit"] = True

    def fail(module: nn.Module, gradients: Any) -> None:
        raise RuntimeError("the client's hook")

    def body(fails: bool, engine: tessera.Engine, rank: int) -> list[torch.Tensor]:
        if fails:
            blocks: Any = engine.module.blocks
            handle = blocks[-1].register_full_backward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="the client's hook"):
                (engine(*batch(rank)) * 100).backward()
            handle.remove()
            engine.zero_grad()
        engine(*batch(rank)).backward()
        engine.step()
        return [param.detach().clone() for param in engine.module.parameters()]

    expected, found = (engines(make(), world, clip, functools.partial(body, fails)) for fails in (False, True))
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipping_by_unit_is_that_of_torch(stage: int, world: int) -> None:
    """torch's own clip_grad_norm_ of each unit's parameters, beside SGD. Sums of squares in another order: rounding."""
    limit = 0.02
    clip = config(stage, gradient_clipping=limit)
    clip["tessera"] = {"min_unit_elements": 1, "update_in_backward": True, "clip": "unit"}

    def body(engine: tessera.Engine, rank: int) -> Any:
        for step in range(3):
            engine(*batch(10 * step + rank)).backward()
            engine.step()
        return weights(engine.module)

    plain = make()
    own: list[nn.Module] = [*plain.blocks]  # type: ignore[misc]
    own += [plain.embed, plain.head] if stage == 3 else []  # type: ignore[list-item]
    units = [list(module.parameters()) for module in own]
    in_units = {id(param) for unit in units for param in unit}
    units.append([param for param in plain.parameters() if id(param) not in in_units])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    clipped = 0
    for step in range(3):
        optimizer.zero_grad()
        (sum(plain(*batch(10 * step + rank)) for rank in range(world)) / world).backward()
        clipped += sum(bool(nn.utils.clip_grad_norm_(unit, limit) > limit) for unit in units)
        optimizer.step()
    assert clipped >= 6, "the limit says something"
    for found in engines(make(), world, clip, body):
        torch.testing.assert_close(found, {n: p.detach() for n, p in plain.named_parameters()}, rtol=1e-5, atol=1e-6)


PREVIOUS = {"min_unit_elements": 1, "update_in_backward": True, "clip": "previous"}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("stage", "more"), [(1, {"bf16": BF16}), (2, {}), (3, {"bf16": BF16})])
def test_clipping_by_the_step_before(stage: int, more: dict[str, Any], world: int, tmp_path: pathlib.Path) -> None:
    """The usual step that is given the norm of the one before does the same, also from a checkpoint on."""
    clip = settings(stage, False, gradient_clipping=0.02) | more

    def usual(engine: tessera.Engine, rank: int) -> Any:
        before = 0.0
        for step in range(4):
            engine(*batch(10 * step + rank)).backward()
            norm = engine.grad_norm()
            engine.step(global_norm=before)
            before = norm
        return weights(engine.module)

    def early(begin: int, engine: tessera.Engine, rank: int) -> Any:
        if begin > 0:
            engine.load_checkpoint(str(tmp_path), tag="2")
        for step in range(begin, 4):
            if step == 2 and begin == 0:
                engine.save_checkpoint(str(tmp_path), tag="2")
            engine(*batch(10 * step + rank)).backward()
            engine.step()
            assert (engine.global_grad_norm() or 0) > 0.02
        return weights(engine.module)

    expected = engines(make(), world, clip, usual)
    for begin in (0, 2):
        found = engines(make(), world, clip | {"tessera": PREVIOUS}, functools.partial(early, begin))
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_a_norm_that_is_not_finite_clips_nothing(tmp_path: pathlib.Path) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        engine.save_checkpoint(str(tmp_path), tag="a")
        (engine(*batch(rank)) * float("inf")).backward()
        engine.step()
        with pytest.raises(RuntimeError, match="the norm of step 1"):
            engine(*batch(rank)).backward()
        engine.load_checkpoint(str(tmp_path), tag="a")
        engine(*batch(rank)).backward()
        engine.step()

    engines(make(), 2, settings(2, True, gradient_clipping=1.0) | {"tessera": PREVIOUS}, body)


def test_gradients_cannot_be_asked_for() -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        engine(*batch(0)).backward()
        assert all(param.grad is None for param in engine.module.parameters())
        param = next(engine.module.parameters())
        assert tessera.state.get_full_grad(engine, param) is None
        with pytest.raises(RuntimeError, match=r"\[engine\.clip_grad_norm_\] .*used the gradients.*tessera\.clip"):
            engine.clip_grad_norm_(1.0)
        with pytest.raises(RuntimeError, match=r"call step\(\)"):
            engine.zero_grad()
        engine.step()
        with pytest.raises(RuntimeError, match="every backward is a step"), engine.no_sync():
            pass

    engines(make(), 1, settings(1, True), body)


def test_what_excludes_it_is_named() -> None:
    with pytest.raises(ValueError, match="gradient_clipping 1"):
        engines(make(), 1, settings(1, True, gradient_clipping=1.0), life)
    with pytest.raises(ValueError, match=r"needs tessera\.update_in_backward"):
        tessera.Config.from_dict({"tessera": {"clip_by_unit": True}})
    with pytest.raises(ValueError, match=r"tessera\.clip: needs tessera\.update_in_backward"):
        tessera.Config.from_dict({"tessera": {"clip": "previous"}})
