"""The package itself: import time, no side effects, version check, types."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import tessera

IMPORT = """
import time, sys, os, threading
start = time.process_time()
import torch, torch.distributed, torch.utils.data
torchs = time.process_time() - start
before = (dict(os.environ), torch.get_num_threads(), torch.get_rng_state(), threading.active_count())
start = time.process_time()
import tessera
spent = time.process_time() - start
assert dict(os.environ) == before[0]
assert torch.get_num_threads() == before[1]
assert torch.equal(torch.get_rng_state(), before[2])
assert threading.active_count() == before[3]
assert not torch.distributed.is_initialized()
import logging
assert not logging.getLogger().handlers and not logging.getLogger("tessera").handlers
print(spent / torchs)
"""


def test_import_is_quick_and_has_no_side_effects() -> None:
    """Beside torch's own import, which the same machine has just shown under the same load."""
    shares = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        shares.append(float(done.stdout))
        if shares[-1] < 0.3:
            return
    pytest.fail(f"import tessera took {min(shares):.0%} of the time of importing torch")


PROGRAM = """
import torch, tessera
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = tessera.initialize(model=model, optimizer=optimizer, config={"train_batch_size": 2})
engine.backward(engine(torch.ones(2, 4)).sum())
engine.step()
"""


def test_a_program_that_keeps_its_engine_ends_quietly() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_public_names_have_types_and_docs() -> None:
    assert (Path(tessera.__file__).parent / "py.typed").exists()
    for name in tessera.__all__:
        assert hasattr(tessera, name)
    for cls in (tessera.Engine, tessera.Optimizer):
        for name, member in inspect.getmembers(cls, inspect.isfunction):
            if not name.startswith("_") and member.__module__.startswith("tessera"):
                assert "return" in member.__annotations__, f"{cls.__name__}.{name}"


def test_stub_matches_the_compiled_module() -> None:
    """Every name in the stub exists, and every compiled name is in the stub."""
    import ast

    folder = Path(inspect.getfile(tessera)).parent
    trees = [ast.parse(path.read_text()) for path in sorted(folder.glob("_core*.pyi"), reverse=True)]
    stub: dict[str, set[str]] = {}
    for node in (node for tree in trees for node in tree.body):
        if isinstance(node, ast.ClassDef):
            members = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            members |= {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}  # type: ignore[union-attr]
            members |= {t.id for n in node.body if isinstance(n, ast.Assign) for t in n.targets}  # type: ignore[attr-defined]
            bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id.startswith("_")]
            stub[node.name] = members.union(*(stub[base] for base in bases))
        elif isinstance(node, ast.FunctionDef):
            stub[node.name] = set()
        elif isinstance(node, ast.AnnAssign):
            stub[node.target.id] = set()  # type: ignore[union-attr]
    module = sys.modules[tessera.Config.__module__]
    compiled = {name for name in dir(module) if not name.startswith("_")}
    stub = {name: members for name, members in stub.items() if not name.startswith("_")}
    assert compiled == set(stub)
    with_keys = {"Config": tessera.Config.from_dict({})}  # keys are attributes of the object, not of the class
    for name, members in stub.items():
        compiled = getattr(module, name)
        if inspect.isclass(compiled):
            real = {m for m in dir(with_keys.get(name, compiled)) if not m.startswith("_")} - {"name", "value"}
            assert real == {m for m in members if not m.startswith("_")} - {"name", "value"}, name


def test_cmake_finds_the_package_inside_this_one(tmp_path: Path) -> None:
    """README: find_package(Tessera) with CMAKE_PREFIX_PATH from tessera.cmake_prefix_path."""
    if not list(Path(tessera.cmake_prefix_path).glob("**/TesseraConfig.cmake")):
        pytest.skip("tessera runs from a build tree, not from an installed package")
    consumer = Path(__file__).parents[1] / "consumer"
    command = ["cmake", "-S", str(consumer), "-B", str(tmp_path), f"-DCMAKE_PREFIX_PATH={tessera.cmake_prefix_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
