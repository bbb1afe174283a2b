"""Backwards and outputs at the edge of what torch allows: refused by name, or handed through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradient_penalties import PENALTIES
from support import (
    Net,
    applied_step,
    assert_close,
    batch,
    config,
    engines,
    full_grads,
    make,
    one_backward,
    same_gradients,
)
from torch.utils.checkpoint import checkpoint

import tessera

STAGES = [0, 1, 2, 3]


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_is_to_be_differentiated_is_refused_by_name(stage: int) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        with pytest.raises(RuntimeError, match=r"with create_graph: .*autograd's grad"):
            engine(*batch(rank)).backward(create_graph=True)
        assert all(param.grad is None for param in engine.module.parameters())
        assert not engine.core.has_gradients()
        engine(*batch(rank)).backward()

    same_gradients(make(), 2, config(stage), body, one_backward)


@pytest.mark.parametrize("stage", STAGES)
def test_an_output_whose_node_torch_hides_is_handed_through(stage: int) -> None:
    """A view whose base was changed in place: only its use is an error, its being returned is none."""

    class Hides(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
            first, _ = (x * self.gain).unbind(0)[:2]
            with torch.no_grad():
                first.add_(1)
            return super().forward(x, y), first

    def body(engine: tessera.Engine, rank: int) -> None:
        for _ in range(3):
            loss, hidden = engine(*batch(rank))
            with pytest.raises(RuntimeError):
                hidden.grad_fn  # noqa: B018
            loss.backward()
            engine.step()
            assert engine.was_step_applied() and not engine.core.inside_module()

    engines(make(Hides), 2, config(stage), body)


class Detached(Net):
    """The head's weight is read detached, too, after its tracked use; the blocks run between the two."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        features = self.features(x)
        out = self.head(features) * self.gain + features @ self.head.weight.detach().t()
        return out if y is None else ((out.float() - y) ** 2).mean()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("form", PENALTIES)
def test_gradients_of_gradients(form: Any, stage: int) -> None:
    def twice(m: Any, rank: int) -> None:
        for _ in range(2):  # the second one finds what the first one left
            m.zero_grad()
            form(m, rank).backward()

    same_gradients(make(), 2, config(stage), twice, then=applied_step)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("times", [1, 2])
def test_a_weight_used_detached_beside_its_tracked_use(stage: int, times: int) -> None:
    def run(m: Any, rank: int) -> None:
        x, y = batch(rank)
        loss = m(x.requires_grad_(True), y)
        for time in range(times):
            loss.backward(retain_graph=time < times - 1)

    same_gradients(make(Detached), 2, config(stage), run)


class Checkpointed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(17, 17) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True).tanh()
        return x.square().mean()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_module_called_directly_with_reentrant_checkpoints_has_one_backward(stage: int) -> None:
    def train(engine: Any, rank: int) -> dict[str, torch.Tensor]:
        for number in (1, 2):
            inputs = torch.randn(4, 17, generator=torch.Generator().manual_seed(rank)).requires_grad_()
            engine.module(inputs).backward()
            assert engine.core.backwards() == number
            grads = full_grads(engine)
            engine.zero_grad()
        engine(inputs).backward()
        assert engine.core.backwards() == 3
        return grads

    model = Checkpointed()
    for rank in range(2):
        inputs = torch.randn(4, 17, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        (model(inputs) / 2).backward()
    want = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad()
    options = config(stage) | {"tessera": {"min_unit_elements": 1}}
    for grads in engines(model, 2, options, train):
        assert_close(grads, want)
