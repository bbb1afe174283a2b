"""One program of Transformers and one of Accelerate under DeepSpeed itself and under the alias: the same losses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from programs import PEERS, run_peer
from test_deepspeed import TOLERANCE

CLIENTS = Path(__file__).parents[1] / "clients"
ALIAS = Path(__file__).parents[2] / "python" / "deepspeed_alias"
pytestmark = pytest.mark.skipif(not PEERS, reason="make test-peers")


def losses(folder: Path, world: int, *paths: Path, **environment: str) -> list[dict[str, Any]]:
    folder.mkdir()
    path = os.pathsep.join([str(CLIENTS), *map(str, paths), os.environ.get("PYTHONPATH", "")])
    run_peer(folder, "client_program.py", world, str(folder), PYTHONPATH=path, **environment)
    return [json.loads((folder / f"losses-{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2])
def test_losses_are_deepspeeds(world: int, tmp_path: Path) -> None:
    theirs = losses(tmp_path / "theirs", world)
    # The alias hides DeepSpeed, which is installed there too.
    ours = losses(tmp_path / "ours", world, ALIAS, TESSERA_DEEPSPEED_ALIAS="1")
    for their, our in zip(theirs, ours, strict=True):
        assert "tessera" in our["version"] and "tessera" not in their["version"]
        assert our["losses"].keys() == their["losses"].keys()
        for name, values in their["losses"].items():
            assert our["losses"][name] == pytest.approx(values, rel=TOLERANCE[name[-4:]]), name
