"""What a checkpoint has beside tensors."""

from __future__ import annotations

import io
import os
from argparse import Namespace
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from tessera._blobs import pickled, unpickled
from tessera.errors import ConfigError, IoError

SHARED = [np.int64(3)]
ARRAYS = [np.arange(6).astype(dtype).reshape(2, 3) for dtype in ("float64", "int8", "uint16", "bool", "complex64")]


@pytest.mark.parametrize("trusted", [False, True])
def test_numbers_and_arrays_of_numpy_need_no_trust(trusted: bool) -> None:
    stream = io.BytesIO(b"\x00abc\xff")
    stream.seek(2)
    value = {
        "numbers": (np.float64(0.5), np.float32(0.5), np.bool_(True), np.str_("a"), np.complex128(1j)),
        "arrays": [*ARRAYS, ARRAYS[0].T, np.array(2.5), np.zeros((0, 3))],
        "ordered": OrderedDict(a=SHARED, b=SHARED),
        np.int64(7): torch.ones(2),
        "stream": stream,
    }
    back = unpickled(pickled(value, "it"), "it", trusted)
    assert back["numbers"] == (0.5, 0.5, True, "a", 1j)
    assert [type(n) for n in back["numbers"]] == [float, float, bool, str, complex]
    for mine, was in zip(back["arrays"], value["arrays"], strict=True):
        assert type(mine) is np.ndarray and mine.dtype == was.dtype and np.array_equal(mine, was)
    assert back["ordered"]["a"] is back["ordered"]["b"] and back["ordered"] == {"a": [3], "b": [3]}
    assert torch.equal(back[7], torch.ones(2))
    assert back["stream"].read() == b"bc\xff" and back["stream"].getvalue() == stream.getvalue()


def test_what_holds_itself_stays_so() -> None:
    value: list[Any] = [np.int64(1)]
    value.append(value)
    assert unpickled(pickled([1, value[1:]], "it"), "it", True)[0] == 1


def test_objects_need_trust_and_the_error_says_so() -> None:
    data = pickled({"args": Namespace(lr=3)}, "client_state")
    with pytest.raises(IoError, match=r"client_state.*argparse\.Namespace.*trusted=True") as caught:
        unpickled(data, "client_state", False)
    assert "\x1b" not in str(caught.value)
    assert unpickled(data, "client_state", True)["args"].lr == 3


def test_what_cannot_be_pickled_or_read_is_named() -> None:
    with pytest.raises(ConfigError, match=r"client_state.*pickle"):
        pickled({"f": lambda: os}, "client_state")
    for trusted in (False, True):
        with pytest.raises(IoError, match="client_state"):
            unpickled(b"PK\x03\x04 no more", "client_state", trusted)
