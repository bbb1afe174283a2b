from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster of more CPUs than there are, whose workers import what this process does."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (requirements/ray.txt)")
    folders = [str(Path(__file__).parent), *(os.path.abspath(folder) for folder in sys.path if folder)]
    saved = {name: os.environ.get(name) for name in ("PYTHONPATH", "RAY_USAGE_STATS_ENABLED", "OMP_NUM_THREADS")}
    os.environ.update(PYTHONPATH=os.pathsep.join(folders), RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1")
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=100 << 20,
    )
    yield
    ray.shutdown()
    for name, value in saved.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
