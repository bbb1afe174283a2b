"""Which part goes from which rank to which: every element once, whatever the ranks of both sides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tessera._core import route, wanted_boxes, whole_boxes
from tessera.errors import ConfigError
from tessera.hybrid._layout import Dims, Layout, inside, sizes_of

layouts = st.builds(Layout, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))


@given(layouts, layouts, st.lists(st.integers(0, 5), min_size=9, max_size=9), st.sampled_from([0, 1]), st.data())
def test_every_element_arrives_once_and_goes_back_once(source, target, sizes, sequence_dim, data):
    """Packed tokens (both cuts along one dim) with parts of any size, or rows and a sequence of two dims."""
    dims = Dims(0, sequence_dim)
    if sequence_dim == 0:
        shapes = [(sizes[part], 2) for part in range(source.parts)]
    else:
        shapes = [(sizes[p // source.sequence], 1 + sizes[8 - p % source.sequence]) for p in range(source.parts)]
    whole, held = whole_boxes(source, dims, shapes, "here")
    samples = None
    if data.draw(st.booleans()):
        cuts = sorted(data.draw(st.lists(st.integers(0, whole[0]), max_size=4)))
        samples = [b - a for a, b in zip([0, *cuts], [*cuts, whole[0]], strict=True)]
    wanted = wanted_boxes(target, dims, whole, samples, "here")
    for givers, takers in ((held, wanted), (wanted, held)):
        seen = torch.zeros(whole, dtype=torch.int)
        for taker in takers:
            got = torch.zeros(sizes_of(taker), dtype=torch.int)
            for part in range(len(givers)):
                common = route(givers, part, taker)
                if common is not None:
                    got[inside(common, taker)] += 1
            assert (got == 1).all()
            seen[tuple(slice(*edge) for edge in taker)] += 1
        assert (seen == 1).all()


def test_replicas_take_turns():
    layout = Layout(batch=2, replicas=2)
    assert [layout.holder(1, taker) for taker in range(4)] == [2, 3, 2, 3]
    assert [layout.part(rank) for rank in range(4)] == [(0, 0), (0, 0), (1, 0), (1, 0)]


@pytest.mark.parametrize(
    ("layout", "dims", "shapes", "message"),
    [
        (Layout(batch=2), Dims(), [(2, 3), (2, 4)], "do not fit together"),
        (Layout(batch=2), Dims(2), [(2, 3), (2, 3)], "batch_dim is 2"),
        (Layout(sequence=2), Dims(0, 1), [(2, 3), (1, 3)], "do not fit together"),
        (Layout(batch=2, sequence=2), Dims(0, 1), [(2, 3), (1, 3), (2, 3), (2, 3)], "rows along dim 0"),
        (
            Layout(batch=2, sequence=2),
            Dims(0, 1),
            [(1, 3), (1, 2), (1, 3), (1, 3)],
            r"other lengths along dim 1: \[\[3, 2\], \[3, 3\]\]",
        ),
    ],
)
def test_parts_that_do_not_fit(layout, dims, shapes, message):
    with pytest.raises(ConfigError, match=message):
        whole_boxes(layout, dims, shapes, "here")


def test_bad_layouts():
    with pytest.raises(ConfigError, match="batch=0"):
        Layout(batch=0)
    with pytest.raises(ConfigError, match="sequence_dim"):
        Dims().check(Layout(sequence=2), "here")
    with pytest.raises(ConfigError, match="samples of"):
        wanted_boxes(Layout(batch=2), Dims(), (4,), [1, 2], "here")
