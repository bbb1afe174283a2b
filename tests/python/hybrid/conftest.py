from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from link_ranks import RAY_ENVIRONMENT


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster of more CPUs than there are, whose workers import what this process does."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (requirements/ray.txt)")
    folders = [str(Path(__file__).parent), *(os.path.abspath(folder) for folder in sys.path if folder)]
    changes = RAY_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(folders)}
    saved = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
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
