"""The package itself: import time, no side effects, version check, types."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typed_program

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


# Modules without an underscore that sub-packages have for each other.
INSIDE = re.compile(r"tessera\.(.*\.)?engines|tessera\.engine\.(front|program)")


def public_modules() -> list[ModuleType]:
    names = [found.name for found in pkgutil.walk_packages(tessera.__path__, "tessera.")]
    return [tessera, *(importlib.import_module(n) for n in names if "._" not in n and not INSIDE.fullmatch(n))]


def public_members(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Functions and classes of `__all__`, and what the classes of Python have without an underscore."""
    for name in getattr(module, "__all__", []):
        found = getattr(module, name)
        if inspect.isfunction(found) or inspect.isclass(found):
            yield f"{module.__name__}.{name}", found
        if inspect.isclass(found) and re.match(r"tessera(?!\._core)", found.__module__):
            for member, value in vars(found).items():
                if not member.startswith("_") and (callable(value) or isinstance(value, (property, classmethod))):
                    yield f"{found.__module__}.{found.__name__}.{member}", getattr(found, member)


def test_public_members_have_docstrings() -> None:
    modules = public_modules()
    members = dict(member for module in modules for member in public_members(module))
    assert [module.__name__ for module in modules if not module.__doc__] == []
    assert [name for name, member in members.items() if not inspect.getdoc(member)] == []
    assert len(members) > 300
    compiled = {member for member in members.values() if inspect.isclass(member) and "._core" in member.__module__}
    bare = []
    for cls in compiled:
        for name, member in vars(cls).items():
            written = re.sub(r"^(\d+\. )?\w+\(.*\) -> .*$", "", inspect.getdoc(member) or "", flags=re.M)
            enum = hasattr(cls, "__members__") and name in ("name", "value")  # pybind11's, as its lines of types are
            if not name.startswith("_") and not written.strip() and not enum:
                bare.append(f"{cls.__name__}.{name}")
    assert len(compiled) > 2 and bare == []


# Where an annotation may say Any, and why.
ANY = {
    r"dict\[str, Any\]": "param groups, states, keywords and JSON: torch's type of them, or the user's",
    r"dict\[torch.Tensor, Any\]": "states of an optimizer, as torch types them",
    r"Engine.forward\(|PipelineModule.forward\(|SequenceAttention.forward\(": "of the user's modules",
    r"Receiver.receive\(return": "what the sender's engine gave, of any nesting",
    r"ActorGroup.call|Program.(run|step)|hybrid.wait": "arguments and results of methods of the user's class",
    r"Program.(load|restore)\(return": "the JSON that save() got",
    r"hybrid.Pending": "references of Ray, which has no types where it is not installed",
    r"initialize\(return": "of its overloads: the engine that engine_type makes",
    r"Loader\(loader": "batches are what the user's collate_fn makes",
    r"activation_checkpoint_func|forward_fn": "functions of the user's over values of the user's layers",
    r"get_global_grad_norm|Config.(get|to_dict|from_dict)": "values of any key",
}


def annotations(name: str, member: Any) -> Iterator[str]:
    """`name(parameter): type` of all that a public function, property or class of Python says, of a class its fields
    and constructor."""
    function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    if inspect.isclass(member):
        yield from (f"{name}.{field}: {text}" for field, text in inspect.get_annotations(member).items())
        function = vars(member).get("__init__", lambda: None)
    for parameter, text in getattr(function, "__annotations__", {}).items():
        yield f"{name}({parameter}): {text}"


def stubbed() -> Iterator[str]:
    """The same of the compiled classes that are public."""
    import ast

    public = {name for name in tessera.__all__ if getattr(getattr(tessera, name), "__module__", "").endswith("._core")}
    for path in sorted(Path(inspect.getfile(tessera)).parent.glob("_core*.pyi")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name in public:
                yield from (f"{node.name}.{getattr(part, 'name', '')}: {ast.unparse(part)}" for part in node.body)


def test_types_of_public_members_say_something() -> None:
    said = {text for module in public_modules() for member in public_members(module) for text in annotations(*member)}
    said |= set(stubbed())
    vague = {text for text in said if re.search(r"\bAny\b", text)}
    assert len(said) > 1000
    assert [text for text in sorted(vague) if not any(re.search(where, text) for where in ANY)] == []
    assert [where for where in ANY if not any(re.search(where, text) for text in vague)] == []


def test_a_program_of_a_user_passes_mypy_strict(tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed (requirements/lint.txt)")
    root = Path(__file__).parents[2]
    loop = re.search(r"```python\n(.*?)\n```", (root / "README.md").read_text(), re.S)
    assert loop is not None
    (tmp_path / "loop.py").write_text(loop[1] + "\n")
    program = Path(__file__).with_name("typed_program.py")
    place = Path(tessera.__file__).parents[1]
    path = {} if place.name == "site-packages" else {"MYPYPATH": str(place)}
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--follow-imports=silent",
        "loop.py",
        str(program),
    ]
    command += ["--cache-dir", str(root / ".mypy_cache" / "program")]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_that_program_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed_program.main(tmp_path)
    assert "memory of this rank" in capsys.readouterr().out and (tmp_path / "run.jsonl").exists()


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
            bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in stub]
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


# What torch does not ask for is not there. On each of two ranks, which hold slices of one model.
BARE = """
import importlib.machinery, sys, warnings

ABSENT = ("numpy", "ray", "transformers", "safetensors", "tensorboard", "wandb", "tqdm", "packaging")

class Bare(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Bare
warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's
import torch, tessera

tessera.init_distributed("gloo")
config = {
    "train_batch_size": 2,
    "optimizer": {"type": "AdamW"},
    "checkpoint": {"random_state": True},
    "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": [
        {"patterns": ["^0.weight"], "partition_type": "column"},
        {"patterns": ["^2.weight"], "partition_type": "row"}]}},
}
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
engine, *_ = tessera.initialize(model=model, config=config)
engine.backward(engine(torch.ones(2, 4)).sum())
engine.step()
engine.save_checkpoint(sys.argv[1], client_state={"epoch": 3})
_, client = engine.load_checkpoint(sys.argv[1])
assert engine.global_steps == 1 and client == {"epoch": 3} and "numpy" not in sys.modules
"""


def test_the_package_needs_what_torch_needs(tmp_path: Path) -> None:
    program = tmp_path / "bare.py"
    program.write_text(BARE)
    words = [sys.executable, "-m", "tessera", "launch", "-n", "2", str(program), str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
