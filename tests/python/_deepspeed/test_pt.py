"""Files of torch.save, read without running them; and written, for torch.load."""

from __future__ import annotations

import io
import os
import pickle
import random
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tessera._deepspeed._pt import PtFile
from tessera._deepspeed._pt_writer import Made, Streamed, write_pt
from tessera.errors import IoError


def value() -> dict[str, Any]:
    flat = torch.arange(24, dtype=torch.float32)
    state = OrderedDict(a=flat[4:10].view(2, 3), tied=flat[4:10].view(2, 3), turned=flat[:6].view(2, 3).t())
    state._metadata = OrderedDict(version=1)  # type: ignore[attr-defined]
    return {
        "module": state,
        "more": [torch.tensor(3), torch.empty(0, 4), torch.ones(3, dtype=torch.bfloat16), torch.tensor([True])],
        "plain": {"text": "ä", 1: (None, True, -5, 2**40, 1.5, b"\x00\xff"), "set": {1, 2}, "dtype": torch.float16},
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


@pytest.mark.parametrize(("trusted", "checksums"), [(False, True), (True, True), (False, False)])
def test_reads_what_torch_saves(trusted: bool, checksums: bool, tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(checksums)
    try:
        torch.save(value(), tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    file = PtFile(str(tmp_path / "a.pt"), trusted)
    assert equal(file.plain(file.value), value())
    module = file.value["module"]
    assert module["a"].begin == module["tied"].begin == file.blocks[0].begin + 16
    assert file.value["again"] is module
    data = (tmp_path / "a.pt").read_bytes()
    assert data[module["a"].begin :][:4] == torch.tensor([4.0]).numpy().tobytes()


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    chunks = [torch.arange(7, dtype=torch.bfloat16), torch.arange(5, dtype=torch.bfloat16)]
    streamed = Streamed(torch.bfloat16, (3, 4), lambda: iter(chunks))
    write_pt(str(path), {**value(), "streamed": streamed, "same": streamed, "size": torch.Size([3])})
    for mmap in (False, True):
        loaded = torch.load(path, weights_only=False, mmap=mmap)
        assert equal(loaded.pop("streamed"), torch.cat(chunks).view(3, 4))
        assert equal(loaded.pop("same"), torch.cat(chunks).view(3, 4))
        assert equal(loaded, {**value(), "size": torch.Size([3])})
    assert all(block.begin % 64 == 0 for block in PtFile(str(path)).blocks)
    # An object of a class that is not there, when it is written.
    write_pt(str(path), [Made("collections", "Counter", {"x": 1})] * 2)
    first, second = torch.load(path, weights_only=False)
    assert type(first).__name__ == "Counter" and first.x == 1 and first is second


class Evil:
    def __init__(self, call: Any, *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> Any:
        return self.call, self.args


def nested_tuple(depth: int) -> bytes:
    """A dict with a key that is nested so deep that hashing it would end the process."""
    return b"\x80\x02}" + b")" + b"\x85" * depth + b"K\x01s."


def wide_tuple(depth: int) -> bytes:
    """A dict with a key of 100 ** depth parts, which are shared: hashing it would not end."""
    level = b"q\x00" + b"h\x00" * 99 + b"t"
    return b"\x80\x02}" + b"(" * depth + b"K\x01" + level * depth + b"K\x01s."


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
    torch.save({"module": {"weight": torch.ones(2)}, "client": what}, "a.pt")
    with pytest.raises(IoError, match=r"a\.pt"):
        file = PtFile(str(tmp_path / "a.pt"))
        file.plain(file.value)
    if not isinstance(what, Evil) or what.call is not int:  # which is no class, whoever reads it
        file = PtFile(str(tmp_path / "a.pt"), skip=True)
        assert torch.equal(file.read(file.value["module"]["weight"]), torch.ones(2))
    assert os.listdir(tmp_path) == ["a.pt"]


@pytest.mark.parametrize("how", [{}, {"trusted": True}, {"skip": True}])
def test_what_is_of_numpy(how: dict[str, bool], tmp_path: Path) -> None:
    numbers = [np.float64(0.1), np.float32(0.5), np.bool_(True), np.int8(-3), np.uint64(2**63)]
    arrays = [np.arange(6.0).reshape(2, 3), np.arange(6).reshape(2, 3).T, np.zeros((0, 2), "uint8")]
    stream = io.BytesIO(b"\x00\xff")
    stream.seek(1)
    torch.save({"numbers": numbers, "arrays": arrays, "stream": stream}, tmp_path / "a.pt")
    file = PtFile(str(tmp_path / "a.pt"), **how)
    back = file.plain(file.value)
    assert back["numbers"] == numbers and [type(n) for n in back["numbers"]] == [float, float, bool, int, int]
    assert all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(back["arrays"], arrays, strict=True))
    assert back["stream"].getvalue() == b"\x00\xff" and back["stream"].tell() == 1


def replace(path: Path, pickled: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", b"\0" * 64)


STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x10tQ"  # 16 floats


@pytest.mark.parametrize(
    "pickled",
    [
        nested_tuple(1_000_000),
        wide_tuple(7),
        b"\x80\x02}]K\x01s.",  # unhashable keys
        b"\x80\x02}(}K\x01u.",
        b"\x80\x04\x8f(]\x90.",
        b"\x80\x04(}\x91.",
        b"\x80\x02}r\xff\xff\xff\x7fK\x01K\x02.",  # its memo has a place beyond any memory
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x3fab.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x3fab.",
        b"\x80\x02(ios\nsystem\n.",  # operations that torch.save does not write
        b"\x80\x02(cos\nsystem\no.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02I1\n.",
        b"\x80\x04\x8c\x05torch\x8c\x19serialization.os.system\x93.",
        b"\x80\x02]K\x00K\x01s.",  # items of what has none
        b"\x80\x02}K\x00a.",
        b"\x80\x02ccollections\nOrderedDict\nK\x01b.",
        b"\x80\x02ccollections\nOrderedDict\n)R(K\x01u.",
        b"\x80\x02" + b"]q\x00h\x00a" * 3,  # no end
        b"\x80\x02r\xff\xff\xff\x7f.",
        b"\x80\x02X\xff\xff\xff\x7fab.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\x0fK\x02\x85K\x01\x85\x89}tR.",  # beyond
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"J\xff\xff\xff\xffK\x02\x85K\x01\x85\x89}tR.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x00K\x02\x85K\x01\x85\x89}tR.",
        b"\x80\x02" + STORAGE.replace(b"0X\x03", b"9X\x03") + b".",  # no such record
        b"\x80\x02" + STORAGE.replace(b"K\x10", b"K\x11") + b".",  # larger than its record
        b"\x80\x02ccollections\nOrderedDict\n)R}b.\x80",
        b"\x80\x02ctorch\nfloat32\n)R.",
        b"\x80\x02K\x01)R.",
        b"\x80\x02}}s.",
        b"(.",
        b".",
        b"",
    ],
    ids=range(33),
)
def test_hostile_pickles(pickled: bytes, tmp_path: Path) -> None:
    replace(tmp_path / "a.pt", pickled)
    try:
        PtFile(str(tmp_path / "a.pt"))
    except IoError as error:
        assert "a.pt" in str(error)
    else:
        assert pickled.endswith(b"R}b.\x80")  # what is after the end is not read


def test_what_repeats_a_small_tensor_is_not_made(tmp_path: Path) -> None:
    torch.save(torch.zeros(1).expand(1 << 50), tmp_path / "a.pt")
    file = PtFile(str(tmp_path / "a.pt"))
    with pytest.raises(IoError, match="repeats"):
        file.plain([file.value])


def test_shared_lists_stay_small(tmp_path: Path) -> None:
    laughs: Any = ["ha"]
    for _ in range(100):
        laughs = [laughs, laughs]
    torch.save(laughs, tmp_path / "a.pt")
    file = PtFile(str(tmp_path / "a.pt"))
    file.plain(file.value)


def test_mutated_files(tmp_path: Path) -> None:
    """A named error, or a value whose tensors are inside the file."""
    path = tmp_path / "a.pt"
    torch.save(value(), path)
    good = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        pickled = archive.read(name)
    rng = random.Random(7)
    read = 0
    for number in range(1000):
        if number % 2:
            bad = bytearray(good)
            for _ in range(rng.randint(1, 4)):
                bad[rng.randrange(len(bad))] = rng.randrange(256)
            path.write_bytes(bad[: rng.randrange(len(bad))] if rng.random() < 0.2 else bad)
        else:
            changed = bytearray(pickled)
            for _ in range(rng.randint(1, 3)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            with zipfile.ZipFile(path, "w") as archive, zipfile.ZipFile(__import__("io").BytesIO(good)) as old:
                for entry in old.namelist():
                    archive.writestr(entry, bytes(changed) if entry == name else old.read(entry))
        try:
            file = PtFile(str(path))
            file.plain(file.value)
            read += 1
        except (IoError, RecursionError) as error:
            assert isinstance(error, RecursionError) or "a.pt" in str(error)
    assert 0 < read < 900


def test_old_and_other_files(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(value(), path, _use_new_zipfile_serialization=False)
    with pytest.raises(IoError, match=r"a\.pt"):
        PtFile(str(path))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps([1] * 100, 2))
    with pytest.raises(IoError, match="stored"):
        PtFile(str(path))
    with pytest.raises(IoError, match="cannot be read"):
        PtFile(str(tmp_path / "none.pt"))
