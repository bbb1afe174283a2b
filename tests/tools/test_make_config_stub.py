"""Types of a configuration's keys, as Python has them."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch

from tessera import Config, _core

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from make_config_stub import STUB, stub_of


def test_the_stub_is_that_of_the_table():
    assert STUB.read_text() == stub_of(_core.key_types()), "run tools/make_config_stub.py"


def test_every_attribute_has_the_value_of_its_path():
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    settings = Config.from_dict({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}})
    for path, kind in _core.key_types():
        found = functools.reduce(getattr, path.split("."), settings)
        text = settings.get(path)
        assert found == (dtypes.get(text) if "dtype" in kind else text), path


def test_objects_inside_objects():
    text = stub_of([("a", "int"), ("b.c", "str"), ("b.d_e.f", "bool")])
    assert text.endswith(
        "class _BDE:\n    f: Final[bool]\n\nclass _B:\n    c: Final[str]\n    d_e: Final[_BDE]\n"
        "\nclass _Keys:\n    a: Final[int]\n    b: Final[_B]\n"
    )
