from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)
torch.tanh(torch.ones(64))  # not from two ranks at once for the first time: tests/support/vector_kernels.h


class Skips:
    """The last finder of modules, asked where no other has found one: tests that need such a package are skipped."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in ("hypothesis", "transformers"):
            pytest.skip(f"{name} is not installed (requirements/test.txt)", allow_module_level=True)


sys.meta_path.append(Skips)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def stand_in() -> Path:
    """The library of the stand-in accelerator, of the build tree that make names or else that was built last."""
    root, tree = Path(__file__).parents[1], os.environ.get("TESSERA_BUILD_DIR")
    place = "tests/stand_in/libtessera_privateuseone.so"
    built = [Path(tree, place)] if tree else (root / "build").glob(f"*/{place}")
    found = sorted(filter(Path.exists, built), key=lambda path: path.stat().st_mtime)
    if not found:
        pytest.skip("the stand-in accelerator is built with the C++ tests (make test-cpp)")
    return found[-1]
