"""Values in DeepSpeed's files: what torch.save writes beside the tensors comes back, nothing of it is run; what is
written is what torch.load opens. Damaged and hostile files: tests/checkpoint/deepspeed/pt_test.cpp."""

from __future__ import annotations

import io
import os
import random
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import Net, config, engines, make
from tessera.errors import IoError

from tessera import checkpoints

CONFIG = config(0, checkpoint={"format": "deepspeed"})
TAG = "global_step0"


def value() -> dict[str, Any]:
    flat = torch.arange(24, dtype=torch.float32)
    state = OrderedDict(a=flat[4:10].view(2, 3), tied=flat[4:10].view(2, 3), turned=flat[:6].view(2, 3).t())
    state._metadata = OrderedDict(version=1)  # type: ignore[attr-defined]
    return {
        "module": state,
        "more": [torch.tensor(3), torch.empty(0, 4), torch.ones(3, dtype=torch.bfloat16), torch.tensor([True])],
        "plain": {"text": "ä", 1: (None, True, -5, 2**40, 1.5, b"\x00\xff"), "set": {1, 2}, "dtype": torch.float16},
        "large": [2**63, -(2**70), 2**64 - 1],
        "size": torch.Size([2, 3]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "again": state,
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(b, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in b)
    if isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def save(folder: Path, **client: Any) -> Path:
    """A checkpoint in DeepSpeed's files; the one with the client's state."""
    engines(make(Net), 1, CONFIG, lambda engine, rank: engine.save_checkpoint(folder, client_state=client))
    return folder / TAG / "mp_rank_00_model_states.pt"


def put(path: Path, what: Any) -> None:
    torch.save({**torch.load(path, weights_only=False), "client": what}, path)


def load(folder: Path, trusted: bool = False) -> Any:
    def body(engine: Any, rank: int) -> Any:
        return engine.load_checkpoint(folder, trusted=trusted)[1]["client"]

    return engines(make(Net), 1, CONFIG, body)[0]


@pytest.mark.parametrize(("trusted", "checksums"), [(False, True), (True, True), (False, False)])
def test_reads_what_torch_saves(trusted: bool, checksums: bool, tmp_path: Path) -> None:
    path = save(tmp_path)
    torch.serialization.set_crc32_options(checksums)
    try:
        put(path, value())
    finally:
        torch.serialization.set_crc32_options(True)
    back = load(tmp_path, trusted)
    assert equal(back, value()) and back["again"] is back["module"]


class Evil:
    def __init__(self, call: Any, *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> Any:
        return self.call, self.args


@pytest.mark.parametrize(
    "what",
    [
        Evil(os.system, "touch was-here"),
        Evil(eval, "open('was-here', 'w')"),
        Evil(getattr, "", "join"),
        {"deep": [Evil(Path, "was-here")]},
        Evil(torch.load, "was-here"),
        Evil(int, "5"),
        random.Random(2),
        OrderedDict,
        {"a dict's": Counter(a=2), "a key": {Evil(os.system, "touch was-here"): 1}},
    ],
)
def test_nothing_is_run(what: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path)
    known = checkpoints.state_dict(tmp_path)
    put(path, what)
    with pytest.raises(IoError, match=str(tmp_path)):
        load(tmp_path)
    with pytest.raises(IoError, match=str(tmp_path)):
        checkpoints.to_universal(tmp_path, tmp_path / "out")
    if not isinstance(what, Evil) or what.call is not int:  # which is no class, whoever reads it
        assert equal(checkpoints.state_dict(tmp_path), known)
    assert not (tmp_path / "was-here").exists()


class Mine(dict[str, Any]):
    """Of a client, with items and attributes."""


@pytest.mark.parametrize("trusted", [False, True])
def test_what_is_of_numpy(trusted: bool, tmp_path: Path) -> None:
    path = save(tmp_path)
    numbers = [np.float64(0.1), np.float32(0.5), np.bool_(True), np.int8(-3), np.uint64(2**63), np.float16(2)]
    arrays = [np.arange(6.0).reshape(2, 3), np.arange(6).reshape(2, 3).T, np.zeros((0, 2), "uint8")]
    arrays += [np.arange(3, dtype="uint16"), np.array(2.5)]
    stream = io.BytesIO(b"\x00\xff")
    stream.seek(1)
    put(path, {"numbers": numbers, "arrays": arrays, "stream": stream})
    back = load(tmp_path, trusted)
    assert back["numbers"] == numbers
    assert [type(n) for n in back["numbers"]] == [float, float, bool, int, int, float]
    assert all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(back["arrays"], arrays, strict=True))
    assert back["stream"].getvalue() == b"\x00\xff" and back["stream"].tell() == 1


def test_objects_that_are_trusted(tmp_path: Path) -> None:
    path = save(tmp_path)
    mine = Mine(a=torch.ones(2))
    mine.self, mine.at = mine, Path("x")  # type: ignore[attr-defined]
    put(path, [mine, Counter(a=2), np.array(["text"]), {Path("key"): 1 + 2j, "frozen": frozenset([3])}])
    with pytest.raises(IoError, match="Mine"):
        load(tmp_path)
    back = load(tmp_path, trusted=True)
    assert type(back[0]) is Mine and torch.equal(back[0]["a"], torch.ones(2))
    assert back[0].self is back[0] and back[0].at == Path("x")
    assert back[1] == Counter(a=2) and back[2].tolist() == ["text"]
    assert back[3] == {Path("key"): 1 + 2j, "frozen": frozenset([3])}


def test_shared_lists_stay_small(tmp_path: Path) -> None:
    laughs: Any = ["ha"]
    for _ in range(100):
        laughs = [laughs, laughs]
    path = save(tmp_path)
    put(path, laughs)
    back = load(tmp_path)
    assert back[0] is back[1]


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    client = {"value": value(), "array": np.arange(4).reshape(2, 2), "parts": [np.float64(2.5)]}
    path = save(tmp_path, **client)
    for mmap in (False, True):
        loaded = torch.load(path, weights_only=False, mmap=mmap)
        assert equal(loaded["value"], value()) and np.array_equal(loaded["array"], client["array"])
        assert loaded["parts"] == [2.5] and set(loaded["module"]) == set(make(Net).state_dict())
