"""Checkpoints without an engine: export, inspection, damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Net, batch, config, engines, make, masters, weights
from torch import nn

import tessera
from tessera import checkpoints


class Tied(Net):
    def __init__(self) -> None:
        super().__init__(width=5)
        self.blocks[1].linear.weight = self.blocks[0].linear.weight
        self.register_buffer("scale", torch.arange(3))
        self.blocks[0].norm.bias.requires_grad_(False)


@pytest.fixture(params=[(0, False), (1, True), (3, True)])
def saved(request: Any, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor], nn.Module]:
    stage, bf16 = request.param
    model = make(Tied)

    def body(engine: Any, rank: int) -> Any:
        engine(*batch(rank)).backward()
        engine.step()
        engine.save_checkpoint(tmp_path / "run")
        return {**weights(engine.module), **masters(engine)}

    return tmp_path / "run", engines(model, 2, config(stage, bf16=bf16), body)[0], model


@pytest.mark.parametrize("max_size", [None, 64])
def test_weight_files_are_written_and_read(max_size: int | None, tmp_path: Path) -> None:
    first, second = torch.arange(24.0).view(4, 6).requires_grad_(), torch.arange(3)
    tensors = {"a.weight": first, "tied": first, "b": second}
    names = checkpoints.write_weights(tmp_path, "model.safetensors", tensors, max_size, {"by": "me"})
    assert names == ["model.safetensors"] if max_size is None else len(names) == 3
    for path in (tmp_path, [tmp_path / name for name in names if name.endswith(".safetensors")]):
        reader = checkpoints.WeightReader(path)
        assert reader.tensors() == {
            "a.weight": (torch.float32, [4, 6]),
            "tied": (torch.float32, [4, 6]),
            "b": (torch.int64, [3]),
        }
        assert reader.metadata()["by"] == "me"
        assert all(torch.equal(reader.read(name), value) for name, value in tensors.items())
        assert torch.equal(reader.read("tied", 1, [(0, 1), (4, 6)]), first[:, [0, 4, 5]])
        with pytest.raises(tessera.ConfigError, match="nowhere"):
            reader.read("nowhere")
    with pytest.raises(tessera.errors.IoError):
        checkpoints.WeightReader(tmp_path / "none.safetensors")
    with pytest.raises(tessera.ConfigError, match="'b' is not a dense tensor"):
        checkpoints.write_weights(tmp_path, "other.safetensors", {"b": second.to("meta")})


def test_weights_of_dtypes_below_a_byte(tmp_path: Path) -> None:
    """Those of safetensors' own writer and reader; what torch does not have spoils its own tensor only."""
    packed = torch.arange(12, dtype=torch.uint8).view(4, 3).view(torch.float4_e2m1fn_x2)
    safetensors_torch = pytest.importorskip("safetensors.torch")
    safetensors_torch.save_file({"a": packed}, tmp_path / "theirs.safetensors")
    checkpoints.write_weights(tmp_path, "ours.safetensors", {"a": packed})
    theirs = safetensors_torch.load_file(tmp_path / "ours.safetensors")["a"]
    ours = checkpoints.WeightReader(tmp_path / "theirs.safetensors")
    assert ours.tensors() == {"a": (torch.float4_e2m1fn_x2, [4, 3])}
    for found in (theirs, ours.read("a")):
        assert torch.equal(found.view(torch.uint8), packed.view(torch.uint8))
    assert torch.equal(ours.read("a", 1, [(1, 3)]).view(torch.uint8), packed[:, 1:].view(torch.uint8))

    header = b"""{"a": {"dtype": "F6_E3M2", "shape": [4], "data_offsets": [0, 3]},
        "b": {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]}}"""
    path = tmp_path / "some.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"xxxab")
    reader = checkpoints.WeightReader(path)
    assert reader.tensors() == {"a": ("F6_E3M2", [4]), "b": (torch.uint8, [2])}
    assert reader.read("b").tolist() == [97, 98]
    with pytest.raises(tessera.errors.IoError, match="'a' has the dtype 'F6_E3M2'"):
        reader.read("a")


def test_weights_for_other_tools(saved: Any, tmp_path: Path) -> None:
    folder, values, model = saved
    state = checkpoints.state_dict(folder)
    for name, value in values.items():
        assert torch.equal(state[name], value.float()), name
    tied = "blocks.0.linear.weight", "blocks.1.linear.weight"
    assert state[tied[0]] is state[tied[1]]
    assert state["scale"].dtype == torch.int64
    model.load_state_dict(state)
    assert "blocks.0.norm.bias" not in checkpoints.state_dict(folder, exclude_frozen=True)

    assert checkpoints.export(folder, tmp_path / "st") == ["model.safetensors"]
    names = checkpoints.export(folder, tmp_path / "bin", dtype=torch.bfloat16, max_shard_size="150", safetensors=False)
    assert len(names) == 3  # two files and their index
    index = json.loads((tmp_path / "bin" / names[-1]).read_text())["weight_map"]
    assert index[tied[0]] == index[tied[1]]
    for name, file in index.items():
        value = torch.load(tmp_path / "bin" / file)[name]
        assert torch.equal(value, state[name].to(value.dtype))
        assert value.dtype in (torch.bfloat16, torch.int64)


@pytest.mark.parametrize("tag", ["../run/global_step1", "a/b", "."])
def test_a_tag_is_a_name(tag: str, saved: Any) -> None:
    with pytest.raises(ValueError, match="a tag is the name of one folder"):
        checkpoints.open_checkpoint(saved[0], tag)


def test_safetensors_open_in_the_library_of_that_name(saved: Any, tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    folder, values, _ = saved
    names = checkpoints.export(folder, tmp_path / "st", max_shard_size=300)
    found: dict[str, torch.Tensor] = {}
    for name in names[:-1]:
        found |= load_file(tmp_path / "st" / name)
    assert found.keys() == values.keys() | {"scale"}  # a tied weight once, by its first name
    assert all(torch.equal(found[name], values[name].float()) for name in values)
    for path in folder.glob("*/*.safetensors"):
        load_file(path)  # what a rank wrote, too


def test_commands(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved[0]
    assert checkpoints.main(["inspect", str(folder), "--verify"]) == 0
    said = capsys.readouterr().out
    assert "global_steps: 1" in said
    assert "every byte" in said
    assert checkpoints.main(["export", str(folder), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    assert capsys.readouterr().out == "model.safetensors\n"
    assert checkpoints.main(["inspect", str(tmp_path)]) == 1
    assert "'latest'" in capsys.readouterr().err
    file = next(iter(folder.glob("*/*.safetensors")))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert checkpoints.main(["inspect", str(folder), "--verify"]) == 1
    assert file.name in capsys.readouterr().err


@pytest.mark.parametrize(("size", "expected"), [("5GB", 5 * 10**9), ("4 KiB", 4096), (7, 7), ("9", 9)])
def test_sizes(size: Any, expected: int) -> None:
    assert checkpoints.shard_bytes(size) == expected


@pytest.mark.parametrize("size", ["", "5XB", "-1GB", "0", "1.5GB"])
def test_sizes_that_are_none(size: str) -> None:
    with pytest.raises(tessera.errors.ConfigError, match="max_shard_size"):
        checkpoints.shard_bytes(size)


def test_tags_of_a_folder(saved: tuple[Path, dict[str, torch.Tensor], nn.Module]) -> None:
    folder = saved[0]
    assert checkpoints.tags(folder) == [(folder / "latest").read_text()]
    assert checkpoints.tags(folder / "nothing") == []
