"""Schedules and partitions as Python has them; the core's tests play the tables (tests/pipeline/)."""

from __future__ import annotations

import pytest
from tessera.pipeline._partition import bounds_of, split
from tessera.pipeline._schedule import SCHEDULES, Action, Shape, forward_only, live_bound, training

from tessera import ConfigError


def test_tables_of_the_core() -> None:
    assert set(SCHEDULES) == {"gpipe", "1f1b", "interleaved"}
    micro = ["receive activations", "forward", "backward", "send gradients"]
    assert training("1f1b", Shape(2, 2), 1) == [Action(kind, k, 0) for k in (0, 1) for kind in micro]
    assert forward_only(Shape(2, 1), 0) == [Action("forward", 0, 0), Action("send activations", 0, 0)]
    assert live_bound("1f1b", Shape(4, 16), 1) == 3
    with pytest.raises(ConfigError, match="must be a multiple of 4"):
        training("1f1b", Shape(4, 6, 2), 0)


def test_methods_of_partition() -> None:
    classes = ["Embed", "Block", "Block", "relu", "Block", "Block", "Head"]
    assert bounds_of("uniform", 2, [0] * 7, classes) in ([0, 3, 7], [0, 4, 7])
    assert bounds_of("parameters", 2, [100, 1, 1, 0, 1, 1, 90], classes)[1] in range(1, 7)
    bounds = bounds_of("type:block", 2, [0] * 7, classes)
    assert [sum(name == "Block" for name in classes[a:b]) for a, b in ((0, bounds[1]), (bounds[1], 7))] == [2, 2]
    with pytest.raises(ConfigError, match="finds 1 layers for 2 parts"):
        bounds_of("type:head", 2, [0] * 7, classes)
    with pytest.raises(ConfigError, match="no partition_method 'profile'"):
        bounds_of("profile", 2, [0] * 7, classes)
    with pytest.raises(ConfigError, match="cannot be cut"):
        split([1], 2)
