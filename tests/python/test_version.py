"""The compiled module and the version of torch."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
running = torch.__version__
torch.__version__ = "1.2.3"
try:
    import tessera
except ImportError as error:
    print(error)
torch.__version__ = running.split("+")[0] + "+other"
import tessera
"""


def test_another_minor_version_of_torch_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert "but torch 1.2.3 is installed. Build Tessera again" in done.stdout
