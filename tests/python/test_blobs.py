"""What a checkpoint has beside tensors, by the state of the client in it."""

from __future__ import annotations

import io
import os
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import config, make, with_blob
from tessera.errors import ConfigError, IoError

import tessera

SHARED = [np.int64(3)]
ARRAYS = [np.arange(6).astype(dtype).reshape(2, 3) for dtype in ("float64", "int8", "uint16", "bool", "complex64")]


def saved(folder: Path, value: Any) -> tessera.Engine:
    engine = tessera.Engine(make(), config())
    engine.save_checkpoint(folder, tag="t", client_state={"it": value})
    return engine


@pytest.mark.parametrize("trusted", [False, True])
def test_numbers_and_arrays_of_numpy_need_no_trust(trusted: bool, tmp_path: Path) -> None:
    stream = io.BytesIO(b"\x00abc\xff")
    stream.seek(2)
    value = {
        "numbers": (np.float64(0.5), np.float32(0.5), np.bool_(True), np.str_("a"), np.complex128(1j)),
        "arrays": [*ARRAYS, ARRAYS[0].T, np.array(2.5), np.zeros((0, 3))],
        "ordered": OrderedDict(a=SHARED, b=SHARED),
        np.int64(7): torch.ones(2),
        "stream": stream,
    }
    back = saved(tmp_path, value).load_checkpoint(tmp_path, trusted=trusted)[1]["it"]
    assert back["numbers"] == (0.5, 0.5, True, "a", 1j)
    assert [type(n) for n in back["numbers"]] == [float, float, bool, str, complex]
    for mine, was in zip(back["arrays"], value["arrays"], strict=True):
        assert type(mine) is np.ndarray and mine.dtype == was.dtype and np.array_equal(mine, was)
    assert back["ordered"]["a"] is back["ordered"]["b"] and back["ordered"] == {"a": [3], "b": [3]}
    assert torch.equal(back[7], torch.ones(2))
    assert back["stream"].read() == b"bc\xff" and back["stream"].getvalue() == stream.getvalue()


def test_what_holds_itself_stays_so(tmp_path: Path) -> None:
    value: list[Any] = [np.int64(1)]
    value.append(value)
    assert saved(tmp_path, value).load_checkpoint(tmp_path, trusted=True)[1]["it"][0] == 1


def test_objects_need_trust_and_the_error_says_so(tmp_path: Path) -> None:
    engine = saved(tmp_path, Namespace(lr=3))
    with pytest.raises(IoError, match=r"client_state.*argparse\.Namespace.*trusted=True") as caught:
        engine.load_checkpoint(tmp_path)
    assert "\x1b" not in str(caught.value)
    assert engine.load_checkpoint(tmp_path, trusted=True)[1]["it"].lr == 3


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize(
    "value",
    [
        [1, 2], [0.5], [True], [torch.ones(2)],
        *(torch.ones(2).to(dtype) for dtype in (torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2)),
    ],
)  # fmt: skip
def test_values_of_a_cpp_program(value: Any, trusted: bool, tmp_path: Path) -> None:
    """Lists of one type and some dtypes have a form there that Python has not."""
    engine = saved(tmp_path, 1)
    with_blob(tmp_path / "t", "client_state", bytes(torch._C._pickle_save({"it": value})))  # type: ignore[attr-defined]
    back = engine.load_checkpoint(tmp_path, trusted=trusted)[1]["it"]
    assert str(back) == str(value)


def test_what_cannot_be_pickled_or_read_is_named(tmp_path: Path) -> None:
    engine = saved(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"client_state.*pickle"):
        engine.save_checkpoint(tmp_path, client_state={"f": lambda: os})
    many = {"f": lambda: os, "good": 1, 3: [lambda: os], "last": {"deep": open}}
    with pytest.raises(ConfigError, match=r"client_state holds .*cannot save: 'f': .*; 3: ") as caught:
        engine.save_checkpoint(tmp_path, client_state=many)
    assert "'good'" not in str(caught.value)
    with_blob(tmp_path / "t", "client_state", b"PK\x03\x04 no more")
    for trusted in (False, True):
        with pytest.raises(IoError, match="client_state"):
            engine.load_checkpoint(tmp_path, trusted=trusted)
