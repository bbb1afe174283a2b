from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["TESSERA_DEEPSPEED_ALIAS"] = "1"  # the benchmarks may have installed DeepSpeed beside it
sys.path.insert(0, str(Path(__file__).parents[3] / "python" / "deepspeed_alias"))


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    """initialize() creates one, as DeepSpeed's does."""
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
