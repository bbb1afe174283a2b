"""The configuration: what is missing is named with its remedy."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import nlohmann_json
import pytest
import torch

ROOT = Path(__file__).parents[2]
TORCH = Path(torch.__file__).parent
JSON = Path(nlohmann_json.__file__).parent


@pytest.fixture(scope="module")
def cuda_torch(tmp_path_factory) -> Path:
    """This torch, as one that is built for CUDA."""
    folder = tmp_path_factory.mktemp("packages") / "torch"
    (folder / "lib").mkdir(parents=True)
    for file in [*TORCH.iterdir(), *(TORCH / "lib").iterdir()]:
        target = folder / file.relative_to(TORCH)
        if file != TORCH / "lib" and not target.exists():
            target.symlink_to(file)
    (folder / "lib" / "libtorch_cuda.so").touch()
    return folder


def configured(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Of the library, where no nvcc is on the path."""
    folders = [str(Path(sys.executable).parent), *os.environ["PATH"].split(os.pathsep)]
    tools = os.pathsep.join(f for f in folders if not Path(f, "nvcc").exists())
    alone = {k: v for k, v in os.environ.items() if k not in {"CUDACXX", "CUDA_PATH", "NLOHMANN_JSON", "CMAKE_ARGS"}}
    command = [
        "cmake",
        "-S",
        ROOT,
        "-B",
        folder / "build",
        "-G",
        "Ninja",
        f"-DPython3_EXECUTABLE={sys.executable}",
        "-DCMAKE_IGNORE_PATH=/usr/local/cuda/bin;/usr/local/bin",
        *options,
    ]
    return subprocess.run(
        list(map(str, command)),
        env=alone | {"PATH": tools} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_torch_for_cuda_without_a_compiler(cuda_torch, tmp_path):
    done = configured(tmp_path, f"-DTESSERA_TORCH_DIR={cuda_torch}")
    assert done.returncode == 0, done.stderr
    said = words(done.stderr)
    assert "torch is built for CUDA and there is no nvcc. The kernels for CUDA are LEFT OUT" in said
    assert "Remedy: pip install -r requirements/cuda.txt" in said


def test_the_kernels_for_cuda_can_be_left_out(cuda_torch, tmp_path):
    done = configured(tmp_path, f"-DTESSERA_TORCH_DIR={cuda_torch}", "-DTESSERA_CUDA=OFF", CUDACXX="/bin/false")
    assert done.returncode == 0 and "CUDA" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("options", "environment", "says"),
    [
        ([], {"CUDACXX": "/bin/false"}, "the CUDA compiler that was asked for, /bin/false, does not compile a program"),
        (["-DCMAKE_CUDA_COMPILER=/no/nvcc"], {}, "the CUDA compiler that was asked for, /no/nvcc, does not compile"),
        (["-DTESSERA_TORCH_DIR=/no/torch"], {}, "TESSERA_TORCH_DIR is /no/torch, where there is no torch"),
    ],
)
def test_what_was_asked_for_and_does_not_work(options, environment, says, tmp_path):
    done = configured(tmp_path, *options, **environment)
    assert done.returncode != 0
    assert says in words(done.stderr)


@pytest.mark.parametrize("form", ["headers", "wheel", "neither"])
def test_json_from_a_folder(form, tmp_path):
    folder = tmp_path / "json"
    folder.mkdir()
    if form == "headers":
        (folder / "include").symlink_to(JSON / "include")
    if form == "wheel":
        with zipfile.ZipFile(folder / "nlohmann_json-3-py3-none-any.whl", "w") as wheel:
            for file in (JSON / "include").rglob("*.hpp"):
                wheel.write(file, file.relative_to(JSON.parent))
    done = configured(tmp_path, NLOHMANN_JSON=str(folder))
    assert (done.returncode == 0) == (form != "neither"), done.stderr
    if form == "neither":
        assert f"{folder} has neither nlohmann/json.hpp nor a wheel" in words(done.stderr)
    else:
        commands = (tmp_path / "build" / "build.ninja").read_text()
        assert str(folder if form == "headers" else tmp_path / "build" / "nlohmann_json") in commands
