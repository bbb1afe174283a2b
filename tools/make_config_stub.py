"""Writes python/tessera/_core_config.pyi, the types of keys of a configuration: tessera/config/keys.cpp has the table.

python tools/make_config_stub.py, with the tessera that was built last.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

STUB = Path(__file__).parents[1] / "python" / "tessera" / "_core_config.pyi"
HEAD = '''"""Keys of a configuration that have an effect. tools/make_config_stub.py writes it from the table of keys."""

from typing import Any, Final, Literal

import torch
'''


def class_of(path: str) -> str:
    """The class of an object of the configuration: its whole path, as in `tensor_parallel.tp`."""
    return "_" + "".join(word.capitalize() for word in path.replace(".", "_").split("_"))


def stub_of(types: Iterable[tuple[str, str]]) -> str:
    tree: dict[str, Any] = {}
    for path, kind in types:
        *parents, name = path.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = kind
    return HEAD + "".join(_classes("", tree))


def _classes(path: str, members: dict[str, Any]) -> list[str]:
    """Inner objects first."""
    lines, texts = [], []
    for name, member in members.items():
        inner = f"{path}.{name}" if path else name
        if isinstance(member, dict):
            texts += _classes(inner, member)
            member = class_of(inner)
        lines.append(f"    {name}: Final[{member}]\n")
    return [*texts, f"\nclass {class_of(path) if path else '_Keys'}:\n", *lines]


if __name__ == "__main__":
    from tessera import _core

    STUB.write_text(stub_of(_core.key_types()), encoding="utf-8")
