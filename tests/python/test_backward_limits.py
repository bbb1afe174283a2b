"""Backwards and outputs at the edge of what torch allows: refused by name, or handed through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Net, assert_close, batch, config, engines, full_grads, make, plain_grads

import tessera

STAGES = [0, 1, 2, 3]


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_is_to_be_differentiated_is_refused_by_name(stage: int) -> None:
    def body(engine: tessera.Engine, rank: int) -> Any:
        with pytest.raises(RuntimeError, match=r"create_graph=True.*torch.autograd.grad"):
            engine(*batch(rank)).backward(create_graph=True)
        assert all(param.grad is None for param in engine.module.parameters())
        assert not engine.core.has_gradients()
        engine(*batch(rank)).backward()
        return full_grads(engine)

    want = plain_grads(make(), 2, lambda m, rank: m(*batch(rank)).backward())
    for grads in engines(make(), 2, config(stage), body):
        assert_close(grads, want)


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
