from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)
torch.tanh(torch.ones(64))  # not from two ranks at once for the first time: tests/support/vector_kernels.h


@pytest.fixture(scope="session")
def stand_in() -> Path:
    """The library of the stand-in accelerator that was built last."""
    root = Path(__file__).parents[1]
    built = (root / "build").glob("*/tests/stand_in/libtessera_privateuseone.so")
    found = sorted(built, key=lambda path: path.stat().st_mtime)
    if not found:
        pytest.skip("the stand-in accelerator is built with the C++ tests (make test-cpp)")
    return found[-1]
