"""Warnings of the core are Python's, at the line of the program, and shown where a call fails, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import config, make
from torch import nn

import tessera


def helper(engine: tessera.Engine) -> None:
    engine.offload_states(device="none")


def test_a_warning_names_the_line_that_called_the_package() -> None:
    engine = tessera.initialize(model=make(lambda: nn.Linear(2, 2)), config=config(1))[0]
    with pytest.warns(UserWarning) as caught:
        helper(engine)
        engine.offload_states(device="none")
    lines = [(warning.filename, warning.lineno) for warning in caught if "nothing is moved" in str(warning.message)]
    first = helper.__code__.co_firstlineno + 1
    assert lines == [(__file__, first), (__file__, first + 7)]


def test_a_call_that_fails_warns_too(tmp_path: Path) -> None:
    engine = tessera.initialize(model=nn.Linear(2, 2), config=config(0, accumulation=2))[0]
    engine(torch.ones(1, 2)).sum().backward()
    engine.step()
    engine.save_checkpoint(tmp_path)
    other = tessera.initialize(model=nn.Linear(2, 2), config=config(0, accumulation=3))[0]

    def refuse(src: object, dst: object) -> None:
        raise KeyError

    with pytest.warns(UserWarning, match="was saved inside an accumulation"), pytest.raises(KeyError):
        other.load_checkpoint(tmp_path, custom_load_fn=refuse)
