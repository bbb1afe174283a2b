"""Actor groups on a real Ray cluster of this host."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from tessera.errors import ConfigError, UsageError
from tessera.hybrid import ActorError, ActorGroup

ray_ranks = pytest.importorskip("ray_ranks")


@pytest.fixture(scope="module")
def group(ray_cluster):
    group = ActorGroup("numbers", ray_ranks.Plain, 2, (10,), timeout=300)
    group.start()
    yield group
    group.stop()


def test_calls_of_all_ranks(group):
    assert group.call("add", 1) == [11, 12]
    assert group.call("add", each=[5, 7]) == [15, 18]
    assert group.call("total") == [3.0, 3.0]  # a process group of their own
    assert len(set(group.processes())) == 2
    with pytest.raises(ConfigError, match="has 2 ranks, but each has 3 values"):
        group.call("add", each=[1, 2, 3])


def test_an_error_names_the_rank_and_where(group):
    with pytest.raises(ActorError, match="rank 1 of 'numbers' failed in fail") as caught:
        group.call("fail", 1)
    assert "broken on 1" in str(caught.value) and "ray_ranks.py" in str(caught.value)
    assert caught.value.ranks == [("numbers", 1)]
    assert group.call("add", 0) == [10, 11]  # the others are still there


def test_a_killed_rank_is_named(group):
    processes = group.processes()
    threading.Timer(0.5, os.kill, (processes[1], signal.SIGKILL)).start()
    begin = time.monotonic()
    with pytest.raises(ActorError, match=r"rank 1 of 'numbers' died in sleep\(\)") as caught:
        group.call("sleep", 60)
    assert time.monotonic() - begin < 30
    assert caught.value.ranks == [("numbers", 1)]
    group.stop()
    with pytest.raises(UsageError, match="does not run"):
        group.call("total")
    group.start()
    assert group.call("total") == [3.0, 3.0]


def test_ranks_spread_over_half_a_cpu_each(ray_cluster):
    one = ActorGroup("a", ray_ranks.Plain, 2, placement="spread", cpus=0.5, timeout=300)
    try:
        one.start()
        assert one.call("total") == [3.0, 3.0]
    finally:
        one.stop()


def test_an_object_that_cannot_be_made(ray_cluster):
    one = ActorGroup("a", ray_ranks.Plain, 1, (1, 2, 3), timeout=300)
    with pytest.raises(ActorError, match=r"rank 0 of 'a' failed in __init__\(\)"):
        one.start()
    with pytest.raises(UsageError, match="does not run"):
        one.call("total")


def test_what_the_cluster_cannot_place(ray_cluster):
    with pytest.raises(ConfigError, match=r"could not place 2 ranks .*strict_spread"):
        ActorGroup("a", ray_ranks.Plain, 2, placement="strict_spread", timeout=1).start()


def test_bad_groups():
    with pytest.raises(ConfigError, match="placement must be one of"):
        ActorGroup("a", object, 2, placement="heap")
    with pytest.raises(ConfigError, match="1 rank at least"):
        ActorGroup("a", object, 0)
