"""Schedules as data: played on paper, every table comes to its end, and says what it promises."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tessera.pipeline._partition import bounds_of, split
from tessera.pipeline._schedule import Action, Shape, forward_only, live_bound, training

from tessera import ConfigError

CASES = [("gpipe", 1), ("1f1b", 1), ("gpipe", 2), ("1f1b", 2), ("interleaved", 3)]


def play(tables: list[list[Action]], shape: Shape) -> list[Action]:
    """Runs the tables as stages do: sends never wait, receives take the next message of the sender. The order of all
    computing; fails where nobody can go on or a message is not the one that is expected."""
    wires: dict[tuple[str, int, int], deque[tuple[int, int]]] = {}
    at = [0] * shape.stages
    done: list[Action] = []

    def go(stage: int) -> bool:
        action = tables[stage][at[stage]]
        way, _, what = action.kind.partition(" ")
        part = action.chunk * shape.stages + stage
        if way not in ("send", "receive"):
            done.append(action)
            return True
        ahead = 1 if (what == "activations") == (way == "send") else -1
        other = part + ahead
        ends = (stage, other % shape.stages) if way == "send" else (other % shape.stages, stage)
        wire = wires.setdefault((what, *ends), deque())
        boundary = min(part, other)
        if way == "send":
            wire.append((boundary, action.micro))
        elif not wire:
            return False
        else:
            assert wire.popleft() == (boundary, action.micro), "messages come in another order"
        return True

    while any(at[s] < len(tables[s]) for s in range(shape.stages)):
        moved = False
        for stage in range(shape.stages):
            while at[stage] < len(tables[stage]) and go(stage):
                at[stage] += 1
                moved = True
        assert moved, "no stage can go on"
    assert not any(wires.values()), "a message that nobody took"
    return done


@settings(deadline=None, max_examples=60)
@given(case=st.sampled_from(CASES), stages=st.integers(1, 5), rounds=st.integers(1, 4), more=st.integers(0, 4))
def test_every_table_comes_to_its_end(case: tuple[str, int], stages: int, rounds: int, more: int) -> None:
    name, chunks = case
    stages = max(stages, 2) if chunks > 1 else stages
    micro_batches = rounds * stages + (more if name == "gpipe" or chunks == 1 else 0)
    shape = Shape(stages, micro_batches, chunks)
    tables = [training(name, shape, stage) for stage in range(stages)]
    done = play(tables, shape)
    assert len(done) == 2 * micro_batches * stages * chunks
    for stage, table in enumerate(tables):
        live: set[tuple[int, int]] = set()
        most = 0
        for action in table:
            if action.kind == "forward":
                live.add((action.micro, action.chunk))
                most = max(most, len(live))
            elif action.kind == "backward":
                live.remove((action.micro, action.chunk))
        assert not live, "every forward has its backward"
        assert most == live_bound(name, shape, stage)
        for chunk in range(chunks):
            order = [a.micro for a in table if a.kind == "backward" and a.chunk == chunk]
            assert order == list(range(micro_batches)), "gradients add up in the order of the micro-batches"
        assert [a for a in table if a.kind == "backward"][-1] == Action("backward", micro_batches - 1, 0)


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 1), (4, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_evaluations_only_go_forward(stages: int, chunks: int, micro_batches: int) -> None:
    shape = Shape(stages, micro_batches, chunks)
    done = play([forward_only(shape, stage) for stage in range(stages)], shape)
    assert {action.kind for action in done} == {"forward"}
    assert len(done) == stages * chunks * micro_batches


def test_one_f_one_b_keeps_as_many_as_it_is_far_from_the_end() -> None:
    shape = Shape(4, 16)
    assert [live_bound("1f1b", shape, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [live_bound("gpipe", shape, stage) for stage in range(4)] == [16] * 4


def test_schedules_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="no schedule 'zero-bubble'"):
        training("zero-bubble", Shape(2, 4), 0)
    with pytest.raises(ConfigError, match="needs PipelineModule"):
        training("interleaved", Shape(2, 4), 0)
    with pytest.raises(ConfigError, match="must be a multiple of 4"):
        training("1f1b", Shape(4, 6, 2), 0)


@settings(deadline=None, max_examples=100)
@given(weights=st.lists(st.integers(0, 9), min_size=1, max_size=8), parts=st.integers(1, 4))
def test_the_heaviest_part_is_as_light_as_can_be(weights: list[int], parts: int) -> None:
    if len(weights) < parts:
        with pytest.raises(ConfigError, match="cannot be cut"):
            split(weights, parts)
        return

    def best(begin: int, left: int) -> float:
        if left == 1:
            return sum(weights[begin:])
        return min(
            max(sum(weights[begin:end]), best(end, left - 1)) for end in range(begin + 1, len(weights) - left + 2)
        )

    bounds = split(weights, parts)
    assert bounds[0] == 0 and bounds[-1] == len(weights) and len(bounds) == parts + 1
    sizes = [sum(weights[a:b]) for a, b in pairwise(bounds)]
    assert all(a < b for a, b in pairwise(bounds))
    assert max(sizes) == best(0, parts)


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
