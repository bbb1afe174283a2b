"""The core's commands, called from Python: where their text goes, and what hooks raise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tessera.errors import IoError

from tessera import checkpoints


def test_text_goes_where_python_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert checkpoints.main(["inspect"]) == 2
    out, errors = capsys.readouterr()
    assert not out and errors.startswith("tessera inspect: it needs dir\nusage: tessera inspect dir")
    assert checkpoints.main(["export", "--help"]) == 0
    assert "--max-shard-size SIZE" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["inspect", "export"])
def test_what_a_hook_raises_is_the_callers(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of neither is an error that names both kinds of checkpoints."""
    (tmp_path / "tag").mkdir()
    arguments: list[Any] = [command, str(tmp_path), *(["out"] if command == "export" else []), "--tag", "tag"]
    assert checkpoints.main(arguments) == 1
    errors = capsys.readouterr().err
    assert "manifest.json' is missing, and so are" in errors
    with pytest.raises(IoError, match="so are"):
        checkpoints.open_checkpoint(tmp_path, "tag")
