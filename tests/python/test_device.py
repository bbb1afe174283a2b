"""Engines whose model is not on the CPU: the tests of device_program.py, and the ranks of device_ranks_program.py, in
processes of their own."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import run_program
from tessera._device import emulated

import tessera

UNUSABLE = "[shard.device] tensors on device type 'privateuseone' cannot be trained: the driver is too old;"
SHARED = "ConfigError: [{}] ranks 0 and 1 of host '{}' have one device, privateuseone:{} (stand-in), and the back end"


def output_of(program: str, *arguments: object) -> str:
    command = [sys.executable, Path(__file__).parent / program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_engines_on_a_device(stand_in: Path) -> None:
    assert output_of("device_program.py", stand_in).count(": passed") == 22


def test_a_sample_of_the_grid(stand_in: Path) -> None:
    """tests/tools has all of it."""
    rows = int(output_of("device_grid.py", stand_in, "--sample", "--part", "0/2").splitlines()[-1].split()[0])
    assert rows > 50


def test_a_sample_of_the_grid_on_two_ranks(stand_in: Path) -> None:
    program = Path(__file__).parent / "device_grid.py"
    for text in run_program([sys.executable, program, stand_in, "--sample", "--part", "0/8"], 2):
        found = re.search(r"^(\d+) rows, 0 failed$", text, re.MULTILINE)
        assert found and int(found[1]) > 15, text


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("of_local_rank", ["device 0", "device 1"]),
        (
            "of_a_rank_beyond_the_devices",
            [
                "device 1",
                "device 0; [init_distributed] LOCAL_RANK is 99, but this process sees 4 devices: it takes",
            ],
        ),
        ("late_on_one", ["device 0", "device 1"]),
        ("chosen_by_the_program", ["device 3", "device 2"]),
        ("shared", [SHARED.format("init_distributed", "HOST", 2)] * 2),
        ("shared_over_gloo", ["device 0", "device 0"]),
        ("missing_on_one", ["ConfigError: [init_distributed] rank 0 (host 'HOST') has the back end"] * 2),
        ("another_back_end_on_one", ["ConfigError: [init_distributed] rank 0 (host 'HOST') has the back end"] * 2),
        ("shared_in_a_group_of_the_program", [SHARED.format("initialize", "HOST", 0)] * 2),
        ("shared_by_models", [SHARED.format("initialize", "HOST", 3)] * 2),
        ("shared_by_zero_init", [SHARED.format("initialize", "HOST", 0)] * 2),
        ("no_kernels_on_one", ["NotImplementedError: [initialize] rank 1 (host 'HOST'): " + UNUSABLE] * 2),
    ],
)
def test_each_rank_has_a_device_of_its_own(case: str, expected: list[str], stand_in: Path) -> None:
    """Or all ranks say, before anything travels, which have not."""
    program = Path(__file__).parent / "device_ranks_program.py"
    printed = run_program([sys.executable, program, stand_in, case], 2)
    for text, start in zip(printed, expected, strict=True):
        assert "timed out" not in text, text  # a warning of torch's for each wait that looks around
        assert text.splitlines()[-1].startswith(start.replace("HOST", socket.gethostname())), text
        if start.startswith("ConfigError"):
            assert 'tessera.init_distributed("gloo")' in text


def test_tests_and_their_programs_see_no_gpu(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))")
    assert run_program([sys.executable, tmp_path / "program.py"], 2) == ["''\n"] * 2


@pytest.mark.parametrize(
    ("section", "capability", "warns"),
    [
        ({"bf16": {"enabled": True}}, (7, 5), True),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, (7, 5), True),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, (7, 5), False),
        ({"fp16": {"enabled": True}}, (7, 5), False),
        ({}, (7, 5), False),
        ({"bf16": {"enabled": True}}, (8, 0), False),
    ],
)
def test_bf16_on_a_card_without_it_is_one_warning(section, capability, warns, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Quadro RTX 6000")
    config = tessera.Config.from_dict({"train_micro_batch_size_per_gpu": 1, **section})
    lines = emulated(config, torch.device("cuda", 1))
    assert len(lines) == warns
    assert all("cuda:1 (Quadro RTX 6000) has compute capability 7.5" in line for line in lines)
    assert emulated(config, torch.device("cpu")) == []
