"""Classes of errors, and where the core's arrive."""

from __future__ import annotations

import pytest
import torch
from support import batch, config, make

import tessera


def test_classes() -> None:
    assert issubclass(tessera.ConfigError, ValueError) and issubclass(tessera.ConfigError, AssertionError)
    assert issubclass(tessera.UsageError, RuntimeError) and issubclass(tessera.UsageError, AssertionError)


def test_errors_of_the_core_are_builtin_classes() -> None:
    engine = tessera.Engine(make(), config())
    with pytest.raises(ValueError, match=r"\[engine.*shape"):
        tessera.state.set_full_grad(engine, engine.module.gain, torch.ones(3))
    with pytest.raises(IndexError), engine.no_sync():
        raise IndexError
    engine(*batch(0)).backward()  # no_sync was left
    engine.step()
    engine.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        engine.step()
