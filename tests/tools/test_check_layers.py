"""Every rule of tools/check_layers.py fires on a small example and stays quiet on its legal twin."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import check_layers  # noqa: E402


def findings(files):
    return [f"{path}: {message}" for path, message in check_layers.check_all(files)]


@pytest.mark.parametrize(
    ("path", "include", "legal"),
    [
        ("tessera/zero/a.h", "tessera/shard/layout.h", True),
        ("tessera/zero/a.h", "tessera/zero/b.h", True),
        ("tessera/shard/a.h", "tessera/zero/b.h", False),
        ("tessera/comm/a.h", "tessera/kernels/b.h", False),  # peers
        ("tessera/optim/a.h", "tessera/amp/b.h", False),  # peers
        ("tessera/nn/a.h", "tessera/tessera.h", False),
        ("tessera/engine/a.h", "tessera/tessera.h", False),
        ("tessera/tessera.h", "tessera/engine/engine.h", True),
        ("tessera/tessera.h", "tessera/nn/engine.h", True),
        ("python/src/a.h", "tessera/nn/engine.h", False),
        ("tests/shard/a.h", "tessera/nn/engine.h", True),
    ],
)
def test_layers(path, include, legal):
    assert bool(findings({path: f'#include "{include}"\n'})) == (not legal)


@pytest.mark.parametrize(
    ("path", "line", "legal"),
    [
        ("optim/_a.py", "from tessera.optim import FusedAdam", True),
        ("optim/_a.py", "from tessera import _core, distributed", True),
        ("optim/_a.py", "import torch.optim", True),
        ("optim/_a.py", "from tessera.zero._owners import holder_of", False),  # peers
        ("zero/_a.py", "from tessera import _core, engine", False),
        ("zero/_a.py", "def f():\n    import tessera.engine._engine", False),
        ("engine/_a.py", "from tessera.zero import _leaf", True),
        ("engine/_a.py", "from tessera import state", False),
        ("_loans.py", "from tessera import zero", False),
        ("_loans.py", "from tessera._outputs import tensors_in", False),  # peers
        ("_device.py", "from tessera.distributed import free_port", True),
        ("distributed.py", "from tessera._device import group_device", False),
        ("engine/_a.py", "from ._engine import Engine", True),
        ("engine/_a.py", "from . import _engine", True),
        ("engine/_a.py", "from .. import zero", True),
        ("engine/_a.py", "from .. import state", False),
        ("engine/_a.py", "from ..state import a", False),
        ("state.py", "from tessera import Engine", False),  # a name of __init__'s
        ("state.py", "import tessera", False),
        ("state.py", "from tessera import *", False),
        ("report.py", "import tessera", True),
        ("cli.py", "import tessera.report as report", True),
        ("_new.py", "", False),  # in no layer
        ("state.py", "from tessera.engine import Engine", True),
        ("__init__.py", "from tessera import state, zero", True),
    ],
)
def test_imports_of_the_package(path, line, legal):
    files = {f"python/tessera/{path}": line + "\n", "tests/python/test_x.py": ""}
    found = [text for text in findings(files) if "of the package" in text]
    assert bool(found) == (not legal)


@pytest.mark.parametrize(
    ("line", "legal"), [("import deepspeed.comm", False), ("from deepspeed import zero", False), ("import torch", True)]
)
def test_the_package_does_not_import_its_alias(line, legal):
    assert legal == (not list(check_layers.check_alias("python/tessera/a.py", line)))
    assert not list(check_layers.check_alias("python/deepspeed_alias/deepspeed/_a.py", line))


def of_imports(files):
    named = {f"python/{path}": f"{line}\n" for path, line in files.items()}
    checks = (check_layers.check_circles, check_layers.check_private)
    return [text for check in checks for _, text in check(named)]


@pytest.mark.parametrize(
    ("files", "circle"),
    [
        ({"tessera/zero/_a.py": "from tessera.zero._b import x", "tessera/zero/_b.py": ""}, ""),
        (
            {
                "tessera/zero/_a.py": "from . import _b",
                "tessera/zero/_b.py": "if TYPE_CHECKING:\n    from tessera.zero._a import A",
            },
            "tessera.zero._a tessera.zero._b",
        ),
        (
            {
                "tessera/zero/__init__.py": "from tessera.zero._a import A",
                "tessera/zero/_a.py": "def f():\n    from tessera.zero import B",
            },
            "tessera.zero tessera.zero._a",
        ),
        (
            {
                "tessera/_core.pyi": "from tessera._core_a import A",
                "tessera/_core_a.pyi": "from tessera._core import B",
            },
            "",
        ),
        (
            {
                "deepspeed_alias/deepspeed/_a.py": "import deepspeed._b",
                "deepspeed_alias/deepspeed/_b.py": "from ._a import *",
            },
            "deepspeed._a deepspeed._b",
        ),
    ],
)
def test_circles_of_imports(files, circle):
    assert of_imports(files) == ([f"is in a circle of imports: {circle}"] if circle else [])


@pytest.mark.parametrize(
    ("path", "line", "private"),
    [
        ("tessera/engine/_a.py", "from tessera.zero._owners import holder_of", "tessera.zero._owners.holder_of"),
        ("tessera/state.py", "from tessera.zero import _leaf", "tessera.zero._leaf"),
        ("tessera/__init__.py", "import tessera.zero._leaf", "tessera.zero._leaf"),
        ("tessera/engine/_a.py", "from tessera._far._read import x", "tessera._far._read.x"),
        ("deepspeed_alias/deepspeed/_a.py", "from tessera import _mesh", "tessera._mesh"),
        ("tessera/zero/__init__.py", "from tessera.zero._owners import holder_of", ""),
        ("tessera/zero/_a.py", "from ._owners import _HOME", ""),
        ("tessera/zero/_a.py", "from tessera import _core, _mesh", ""),
        ("deepspeed_alias/deepspeed/_a.py", "from tessera import _core, __version__", ""),
        ("tessera/zero/_a.py", "from torch._dynamo import x", ""),
    ],
)
def test_private_names(path, line, private):
    found = of_imports({path: line, "tessera/zero/_owners.py": ""})
    assert found == ([f"imports {private}, which is private to its package"] if private else [])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from tessera.zero._owners import holder_of", {"tessera.zero._owners"}),
        ("from tessera import _core as core, zero", {"tessera._core"}),
        ("from tessera import zero\nzero._hooks.x = zero.Init", {"tessera.zero._hooks"}),
        ("import tessera\nengine._x = self._x, tessera.zero._hooks.x", {"tessera.zero._hooks"}),
        ("import tessera._core", {"tessera._core"}),
        ("patch.setattr('tessera.zero._init.f', 1)", {"tessera.zero._init"}),
        ("from deepspeed._table import MODULES", {"deepspeed._table"}),
        ("import tessera, torch\ntorch._C.f(tessera.__version__, deepspeed._groups())", set()),
        ("'tessera._core has it'", set()),
        ("make(1)._grid.device = _grid, engine._names", {"make(1)._grid"}),
        ("class Own:\n    def __init__(self):\n        self._grid = 1\nOwn()._grid", set()),
    ],
)
def test_tests_use_public_names(text, names, monkeypatch):
    path = "tests/python/test_x.py"
    of_package = {
        "python/tessera/pipeline/_engine.py": "class E:\n    def f(self):\n        self._grid = self._names = 1\n",
        "python/deepspeed_alias/deepspeed/_engine.py": "class E:\n    def _names(self): ...\n",
    }
    monkeypatch.setattr(check_layers, "check_tests", lambda files: [])
    assert {line.split()[2].rstrip(",") for line in findings(of_package | {path: text})} == names
    monkeypatch.setitem(check_layers.PRIVATE_IN_TESTS, path, {"tessera._core"})
    found = findings({path: text})
    assert any("take it out" in line for line in found) == ("tessera._core" not in names)
    assert findings({"bench/x.py": text}) == []


OF_ENGINE = """
class Engine:
    _made = 1

    def __init__(self):
        self._parts = []

    def _join(self):
        pass
"""
ASKED = "class Asked(Protocol):\n    def _join(self): ...\n\n\n"


@pytest.mark.parametrize(
    ("path", "text", "named"),
    [
        ("engine/_b.py", "def f(engine):\n    engine._join()\n", ""),  # the same package
        ("engine/inner/_b.py", "def f(engine):\n    engine._join()\n", ""),  # below it
        ("state.py", "def f(engine):\n    engine._join()\n", "engine._join"),
        ("state.py", ASKED + "def f(engine: Asked):\n    engine._join()\n", "engine._join"),  # to ask for it is no help
        ("state.py", "def f(engine):\n    engine.core._parts = 1\n", "engine.core._parts"),
        ("state.py", "def f(engine):\n    return engine._made\n", "engine._made"),
        ("state.py", "class A:\n    def f(self):\n        self._join()\n        super()._join()\n", ""),
        ("state.py", "class B:\n    _made = 2\n\n\ndef f(b):\n    return b._made\n", ""),
        ("state.py", "def f(module):\n    return module._parameters\n", ""),  # torch's
        ("state.py", "import tessera\n\ntessera.engine._a.Engine()\n", "tessera.engine._a"),
    ],
)
def test_private_attributes(path, text, named):
    files = {f"python/tessera/{path}": text, "python/tessera/engine/_a.py": OF_ENGINE}
    found = [message for _, message in check_layers.check_attributes(files)]
    assert found == ([f"names {named}, which is private to tessera.engine"] if named else [])


def test_files_that_may_name_private_modules_are_there():
    assert all((ROOT / path).is_file() for path in check_layers.PRIVATE_IN_TESTS)


@pytest.mark.parametrize(
    ("text", "home", "elsewhere"),
    [
        ("c10d::ProcessGroup* g;", "tessera/comm/a.h", "tessera/zero/a.h"),
        ("py::object o;", "python/src/a.h", "tessera/nn/a.h"),
        ("auto a = impl::grad_accumulator(p);", "tessera/zero/hooks.h", "tessera/zero/unit.h"),
        ("std::getenv(name);", "tessera/base/env.h", "tessera/comm/a.h"),
    ],
)
def test_doors(text, home, elsewhere):
    assert findings({home: text}) == []
    (line,) = findings({elsewhere: text})
    assert elsewhere in line
    assert findings({elsewhere: f"// {text}\n"}) == []  # a comment may name it


def test_doors_of_python():
    text = "store = torch._C._distributed_c10d.HashStore()"
    assert not list(check_layers.check_doors("python/tessera/distributed.py", text))
    assert list(check_layers.check_doors("python/tessera/hybrid/_link.py", text))
    assert not list(check_layers.check_doors("python/tessera/hybrid/_link.py", f"# {text}\n"))
    assert not list(check_layers.check_doors("tests/python/test_distributed.py", text))


def test_length():
    assert findings({"tessera/base/a.h": "\n" * 600}) == []
    assert "601 lines" in findings({"tessera/base/a.h": "\n" * 601})[0]
    assert "601 lines" in findings({"examples/a.py": "\n" * 601})[0]


def test_every_source_has_a_test():
    assert "tests/tools/test_x.py" in findings({"tools/x.py": ""})[0]
    assert "tests/python/test_data.py" in findings({"python/tessera/data.py": ""})[0]


@pytest.mark.parametrize(
    ("source", "folder", "no_test", "elsewhere", "test"),
    [
        ("python/tessera/optim/_rules.py", "tests/python/optim/", "support.py", "../zero/test_rules.py", "test_any.py"),
        ("tessera/comm/shm/op.cpp", "tests/comm/shm/", "play.h", "../op_test.cpp", "any_test.cpp"),
        ("tessera/shard/layout.cpp", "tests/shard/", "layout.cpp", "../zero/layout_test.cpp", "any_test.cpp"),
    ],
)
def test_every_folder_has_tests(source, folder, no_test, elsewhere, test):
    for other in ({}, {folder + no_test: ""}, {os.path.normpath(folder + elsewhere): ""}):
        assert f"{source}: has no test {folder}" in findings({source: "", **other})
    assert findings({source: "", folder + test: ""}) == []


def test_machine_paths():
    bad = "/" + "home/someone/x"
    assert "README.md:2" in findings({"README.md": f"a\n{bad}\n"})[0]
    assert findings({"README.md": "/path/to/file and /usr/include\n"}) == []


def test_words_of_one_front_end():
    rows = {
        "give it again=True": 1,
        "Python: again=True": 0,
        "in zero.Init": 1,
        "give it again": 0,
        "leave the context manager": 1,
        "clip_grad_norm_: no": 1,
        "clip_grad_norm: no": 0,
    }
    for text, count in rows.items():
        assert len(findings({"tessera/io/a.cpp": f'fail("{text}");\n', "tests/io/a_test.cpp": ""})) == count
    assert findings({"tessera/io/a.cpp": "// as in zero.Init\n", "tests/io/a_test.cpp": ""}) == []


def test_conditional_code():
    assert "two files" in findings({"tessera/io/a.h": "#ifdef TESSERA_URING\n#endif\n"})[0]
    assert findings({"tessera/io/a.h": "#if defined(__x86_64__)\n#endif\n"}) == []
    assert findings({"tessera/io/a.h": "#define TESSERA_WIDE\n#ifdef TESSERA_WIDE\n#endif\n"}) == []


def test_macros():
    files = {"tessera/base/error.h": "#define TESSERA_CHECK(x)\n", "tests/base/error_test.cpp": ""}
    files |= {"tessera/base/b.h": '#include "tessera/base/error.h"\n', "tessera/base/a.cpp": "TESSERA_CHECK(1);\n"}
    assert "uses TESSERA_CHECK and does not include tessera/base/error.h" in findings(files)[0]
    files["tessera/base/a.cpp"] = '#include "tessera/base/b.h"\nTESSERA_CHECK(1);\n'
    assert findings(files) == []
    files["tessera/base/a.cpp"] = "// TESSERA_CHECK\n"
    assert findings(files) == []


def test_the_command(tmp_path):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "tessera" / "base").mkdir(parents=True)
    (tmp_path / "tessera" / "base" / "a.h").write_text('#include "tessera/zero/b.h"\n')
    command = [sys.executable, str(ROOT / "tools" / "check_layers.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "layer 0 includes tessera/zero/b.h" in done.stdout
