"""DeepSpeed itself is never hidden or replaced silently; an import costs little and says nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import deepspeed
import pytest
from packaging.version import Version

PACKAGE = Path(deepspeed.__file__).parents[1]


def installed(folder: Path, version: str) -> Path:
    info = folder / f"deepspeed-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n")
    return folder


def python(program: str, *paths: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("TESSERA_DEEPSPEED")}
    path = os.pathsep.join([str(p) for p in paths] + [os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, env={**own, "PYTHONPATH": path, **environment})


def test_import_refuses_to_hide_deepspeed(tmp_path: Path) -> None:
    genuine = installed(tmp_path, "0.19.6")
    done = python("import deepspeed", PACKAGE, genuine)
    assert done.returncode != 0 and "pip uninstall deepspeed" in done.stderr
    done = python("import deepspeed; print(deepspeed.__version__)", PACKAGE, genuine, TESSERA_DEEPSPEED_ALIAS="1")
    assert done.stdout.strip() == deepspeed.__version__, done.stderr


def test_installation_refuses_to_replace_deepspeed(tmp_path: Path) -> None:
    import build_alias

    build_alias.refuse_beside_deepspeed([str(tmp_path)])
    build_alias.refuse_beside_deepspeed([str(installed(tmp_path, deepspeed.__version__))])
    with pytest.raises(SystemExit, match=r"DeepSpeed 0\.19\.6 is installed"):
        build_alias.refuse_beside_deepspeed([str(installed(tmp_path, "0.19.6"))])


def test_import_is_quick_and_quiet() -> None:
    program = """
import time, sys
start = time.process_time()
import deepspeed
spent = time.process_time() - start
assert "torch" not in sys.modules and "tessera" not in sys.modules
deepspeed.initialize
print(spent)
"""
    spent = []
    for _ in range(3):
        done = python(program, PACKAGE, TESSERA_DEEPSPEED_ALIAS="1")
        assert (done.returncode, done.stderr) == (0, "")
        spent.append(float(done.stdout))
        if spent[-1] < 0.5:  # torch alone takes more
            return
    pytest.fail(f"import deepspeed took {min(spent):.3f} s before anything is used")


def test_versions_are_what_clients_ask_for() -> None:
    version = Version(deepspeed.__version__)
    assert version.local is not None and version >= Version("0.18.9")
    assert version.release == (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__)
    assert f'version = "{deepspeed.__version__}"' in (PACKAGE / "pyproject.toml").read_text()
