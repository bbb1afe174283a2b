"""Nested values as tensors and a note. Between stages: pipeline/test_values_between_stages.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tessera._nested import Nesting
from tessera.errors import ConfigError

VALUES = Nesting("test", "a layer returned", "stages", "stage", ConfigError)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = plain | st.tuples(plain, plain)
leaves = plain | st.builds(torch.tensor, st.integers(0, 9))
values = st.recursive(
    leaves, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner), max_leaves=12
)


@given(values)
def test_any_nesting_comes_back(value: Any) -> None:
    tensors, note = VALUES.split(value)
    assert repr(VALUES.join(note, tensors)) == repr(value)


def test_what_is_no_plain_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[test\] a layer returned a set; between stages go tensors"):
        VALUES.split([{1}])
    with pytest.raises(ConfigError, match="a layer returned a dict with the key"):
        VALUES.split({torch.dtype: 1})
    with pytest.raises(ConfigError, match=r"another stage sent a os\.path; import it on all stages"):
        VALUES.join('["of", "os", "path", []]', [])
