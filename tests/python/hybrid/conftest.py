from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from link_ranks import RAY_ENVIRONMENT
from tessera.hybrid._object_store import Relay, RendezvousStore


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


@pytest.fixture(scope="session")
def ray_relay(ray_cluster: None) -> Any:
    relay = pytest.importorskip("ray").remote(Relay).options(num_cpus=0).remote()
    pytest.importorskip("ray").get(relay.__ray_ready__.remote())  # may take longer than the timeout of a test's link
    return relay


@pytest.fixture
def store_for(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """A store for links of ranks that are threads, by their transport."""

    def store(transport: str) -> Any:
        if transport != "ray":
            return dist.HashStore()
        relay = request.getfixturevalue("ray_relay")
        return RendezvousStore(request.node.name, dist.HashStore(), lambda: relay)

    return store
