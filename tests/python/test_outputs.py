"""Tensors in the outputs of a module."""

from __future__ import annotations

from typing import Any

import torch


def test_outputs_of_any_form() -> None:
    import dataclasses
    from collections import OrderedDict
    from types import SimpleNamespace

    from tessera._outputs import tensors_in

    a, b = torch.ones(1), torch.zeros(2)

    @dataclasses.dataclass
    class Output:
        loss: Any
        rest: Any = None

    class Fancy(OrderedDict):
        pass

    forms = [(a, [b]), {"x": a, "y": (b, None, 3)}, Output(a, {"z": b}), Fancy(x=a, y=b), SimpleNamespace(p=a, q=[b])]
    for form in forms:
        assert [t.data_ptr() for t in tensors_in(form)] == [a.data_ptr(), b.data_ptr()]
    assert tensors_in(None) == [] and tensors_in(object()) == []
