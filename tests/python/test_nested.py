"""Nested values as tensors and a note. Between stages: pipeline/test_values_between_stages.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tessera.errors import ConfigError
from tessera.sequence import SequenceLoader

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = plain | st.tuples(plain, plain)
leaves = plain | st.builds(torch.tensor, st.integers(0, 9))
values = st.recursive(
    leaves, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner), max_leaves=12
)


def sent(value: Any) -> Any:
    """As it arrives, from a rank to itself."""
    tokens = torch.zeros(1, 2, dtype=torch.long)
    batch = {"input_ids": tokens, "position_ids": tokens, "more": value}
    return next(SequenceLoader([batch], 0, None, 1, "cpu"))["more"]


@given(values)
def test_any_nesting_comes_back(value: Any) -> None:
    assert repr(sent(value)) == repr(value)


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3, 2), (1, 2, 3)])
def test_tensors_of_any_kind_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(2 * math.prod(shape)).to(dtype)[::2].view(shape)
    found = sent([tensor, tensor.t() if tensor.dim() == 2 else tensor])
    assert found[0].dtype is dtype and torch.equal(found[0], tensor)
    assert torch.equal(found[1], tensor.t() if tensor.dim() == 2 else tensor)


def test_what_is_no_plain_value_is_refused() -> None:
    class Local(list[int]):
        """Which no other process can find."""

    with pytest.raises(ConfigError, match=r"\[SequenceLoader\] the batch holds a set; between ranks go tensors"):
        sent([{1}])
    with pytest.raises(ConfigError, match="the batch holds a dict with the key"):
        sent({torch.dtype: 1})
    with pytest.raises(ConfigError, match=r"the batch holds a tensor of the layout Sparse; make it dense"):
        sent([torch.ones(2, 2).to_sparse()])
    with pytest.raises(ConfigError, match=r"another rank sent a .*Local; import it on all ranks, at"):
        sent(Local())
