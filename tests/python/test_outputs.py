"""Outputs of any form: a partitioned module goes once its forward is over, and comes back for the backward."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import config, gathered, make, same_gradients
from torch import nn

import tessera


@dataclasses.dataclass
class Output:
    loss: Any
    rest: Any = None


class Fancy(OrderedDict):
    pass


Pack = Callable[[torch.Tensor, torch.Tensor], Any]
# name: what a module makes of two tensors, how its caller finds them.
FORMS: dict[str, tuple[Pack, Callable[[Any], tuple[torch.Tensor, torch.Tensor]]]] = {
    "tuple": (lambda a, b: (a, [b]), lambda o: (o[0], o[1][0])),
    "dict": (lambda a, b: {"x": a, "y": (b, None, 3)}, lambda o: (o["x"], o["y"][0])),
    "dataclass": (lambda a, b: Output(a, {"z": b}), lambda o: (o.loss, o.rest["z"])),
    "subclass of dict": (lambda a, b: Fancy(x=a, y=b), lambda o: (o["x"], o["y"])),
    "object": (lambda a, b: SimpleNamespace(p=a, q=[b]), lambda o: (o.p, o.q[0])),
    "object of objects": (lambda a, b: SimpleNamespace(o=SimpleNamespace(p=a, q=b)), lambda o: (o.o.p, o.o.q)),
}


class Packing(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.pack, self.linear = FORMS[form][0], nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(self.linear(x))
        return self.pack(y, y.square())


class Caller(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.blocks = form, nn.ModuleList(Packing(form) for _ in range(2))
        self.after: Callable[[], Any] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            a, b = FORMS[self.form][1](block(x))
            self.after()
            x = a + b
        return x.sum()


@pytest.mark.parametrize("form", FORMS)
def test_outputs_of_any_form(form: str) -> None:
    """Tensors that nobody finds keep their module whole until the backward."""
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))

    def body(model: Any, rank: int) -> None:
        seen: list[list[str]] = []
        if isinstance(model, tessera.Engine):
            model.module.after = lambda: seen.append(gathered(model))
        model(x * (rank + 1)).backward()
        blocks = [f"blocks.{number}.linear.{name}" for number in range(2) for name in ("weight", "bias")]
        assert seen in ([], [blocks[:2], blocks] if form == "object of objects" else [[], []])

    cfg = config(3, zero={"stage3_prefetch_bucket_size": 0}, tessera={"min_unit_elements": 1})
    same_gradients(make(Caller, form), 2, cfg, body)
