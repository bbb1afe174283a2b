from __future__ import annotations

import os
import sys
from pathlib import Path

# Before torch looks for devices: these tests and their programs mean the CPU, or the stand-in.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # support.py


@pytest.fixture(scope="session")
def threads_compile() -> None:
    """Ranks that are threads may compile. torch 2.11 for CUDA, where no device is, makes a guard in the thread that
    compiles first, and others crash after that one has ended; made here it stays."""
    torch._C._ensureCUDADeviceGuardSet()


@pytest.fixture
def launched_program() -> Path:
    return Path(__file__).parent / "launched_program.py"
