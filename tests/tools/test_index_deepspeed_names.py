"""The list of names of a package: what each module binds, whatever its sources would do when they run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = {
    "__init__.py": """
import torch
from . import runtime
from .runtime.parts import Engine, _private, unknown
from .runtime.parts import Engine as Other
from deepspeed.runtime import constants as c
__version__ = "1"
""",
    "runtime/__init__.py": "",
    "runtime/constants.py": "SAME = 'same'\nOTHER = 'word'\nNUMBER = 3\nTEXT = 'with spaces'\nSUM = 1 + 2\nlower = 5",
    "runtime/parts.py": """
from .constants import *
raise SystemError("parsed, not run")
if True:
    class Engine: ...
else:
    def build(): ...
try:
    from torch import something
except ImportError:
    a, b = 1, 2
def _private(): ...
def _own(): ...
_hidden = 1
""",
}
EXPECTED = """.
  c@.runtime.constants runtime@.runtime unknown= Other@.runtime.parts.Engine
  from .runtime.parts: Engine _private
.runtime
.runtime.constants
  NUMBER=3 OTHER="word" SAME~ SUM= TEXT= lower=
.runtime.parts
  Engine _own _private a= b= build
  from .runtime.constants: *
"""


def test_names_by_module(tmp_path: Path) -> None:
    for name, source in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    tool = [sys.executable, str(ROOT / "tools" / "index_deepspeed_names.py")]
    done = subprocess.run([*tool, str(tmp_path), "1.2.3"], capture_output=True, text=True, check=True)
    first, rest = done.stdout.split("\n", 1)
    assert "DeepSpeed 1.2.3" in first
    assert [sorted(line.split()) for line in rest.splitlines()] == [sorted(x.split()) for x in EXPECTED.splitlines()]
    assert subprocess.run(tool, capture_output=True, check=False).returncode == 2
