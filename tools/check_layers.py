#!/usr/bin/env python3
"""Checks the house rules that a compiler does not: layers, doors, file length, a test for every source.

usage: check_layers.py [ROOT]     exit status 1 and one line per finding when a rule is broken

The rules, in the order of the functions below:
  layers     a file includes its own folder or a lower layer only
  imports    the same for the Python package
  circles    no files of the Python packages import each other in a circle, for types neither
  private    a name or module with an underscore is imported inside its own package only
  attributes x._name, of another object than the method's own, inside the package that defines the name only
  alias      the package does not import the one that stands for DeepSpeed
  in tests   public names of the package are used; PRIVATE_IN_TESTS, which only shrinks, has the others
  doors      one folder or file each for c10d, pybind11, autograd internals and the environment
  length     no source file is longer than MAX_LINES
  tests      every folder of sources has one of tests; modules of Python and tools a test with their stem
  words      a text of the core has no call in Python's spelling, unless it says that it is Python's
  paths      no path of one particular machine in any tracked text file
  optional   optional parts are two files chosen by the build, not #ifdef
  macros     a file includes, by itself or by what it includes, the header of a macro of Tessera's that it uses
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 600

# Folder -> layer number. Folders of one number never see each other.
LAYERS = {
    "tessera/base": 0,
    "tessera/comm": 1,
    "tessera/kernels": 1,
    "tessera/io": 1,
    "tessera/shard": 2,
    "tessera/amp": 3,
    "tessera/optim": 3,
    "tessera/offload": 3,
    "tessera/parallel": 3,
    "tessera/checkpoint": 3,
    "tessera/zero": 4,
    "tessera/config": 5,
    "tessera/engine": 6,
    "tessera/pipeline": 6,
    "tessera/commands": 7,
    "tessera/nn": 8,
    "python/src": 8,
    "commands/run": 1,  # links neither torch nor the library
    "commands/tessera": 8,
}
UMBRELLA = "tessera/tessera.h"  # lists layers 0-8; only tests, benches, examples and users include it
UMBRELLA_LAYER = 8

# Sub-packages and modules of the Python package, all of them, the lowest first. Those of one row never see each other.
PYTHON_ORDER = (
    "_batches _core errors _copies _former _loans _outputs _random",
    "_warnings",
    "_blobs _command _config _mesh _nested _version autocast data distributed flops loss_scale lr_schedules"
    " monitor recompute units",
    "_device",
    "optim parallel sequence zero",
    "checkpoints estimate launch",
    "engine",
    "hybrid pipeline state",
    "__init__",
    "report",
    "cli",
    "__main__",
)
PYTHON_LAYERS = {name: layer for layer, names in enumerate(PYTHON_ORDER) for name in names.split()}

# The package that stands for DeepSpeed is above all (layer 10): it sees them, and none names it.
ALIAS, ALIAS_NAME = "python/deepspeed_alias/", "deepspeed"

PYTHON_ROOTS = ("python/tessera/", f"{ALIAS}{ALIAS_NAME}/")
PRIVATE = re.compile(r"_(?!_|core)")  # names of this form; _core, the compiled module, is everybody's

# What tests name of the package's private modules, the alias's too. Nothing is added: a test goes through what users
# call, or is one of the C++ that is bound.
PRIVATE_IN_TESTS = {
    # Links of threads over Ray's object store: users reach it by a group of actors only, each of which is a process.
    "tests/python/hybrid/conftest.py": {"tessera.hybrid._object_store"},
    # The tables of Transformers' classes are compared with the sources of all its models, most of which no test builds.
    "tests/python/parallel/test_classes.py": {"tessera.parallel._classes"},
    # What is said of bf16 on cards that no machine of the tests has.
    "tests/python/test_device.py": {"tessera._device"},
}

# What a door is -> (pattern, prefixes of the files that may match it).
DOORS = {
    "c10d": (re.compile(r"\bc10d\b|torch/csrc/distributed"), ("tessera/comm/", "python/src/")),
    "pybind11": (re.compile(r"\bpybind11\b|\bpy::"), ("python/src/",)),
    "autograd internals": (
        re.compile(
            r"grad_accumulator|queue_callback|get_current_graph_task|add_post_hook|add_pre_hook"
            r"|autograd/(engine|graph_task|function_hook)\.h|accumulate_grad\.h"
        ),
        ("tessera/zero/hooks", "tessera/base/compat.h"),
    ),
    "the environment": (re.compile(r"\b(secure_)?getenv\b|\benviron\b"), ("tessera/base/env.", "commands/")),
}

# The same of the Python packages, whose tests and tools may name anything.
PYTHON_DOORS = {
    "c10d below torch.distributed": (
        re.compile(r"\b_?distributed_c10d\b"),
        ("python/tessera/distributed.py", "python/tessera/hybrid/_joining.py"),
    ),
}

# Folders of a person's or a machine's own; written in pieces so that this file passes its own check.
MACHINE_PATH = re.compile("/" + r"(?:home|root|Users|work|tmp/(?:wt|tv))/" + r"[\w.]")
TEXT_SUFFIXES = {".h", ".cpp", ".cu", ".py", ".pyi", ".md", ".txt", ".cmake", ".toml", ".json", ".sh", ".ini", ""}
CXX_SUFFIXES = {".h", ".cpp", ".cu", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.M)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
PYTHON_COMMENT = re.compile(r"#[^\n]*")
CONDITIONAL = re.compile(r"^\s*#\s*(?:ifdef|ifndef|if|elif)\b.*\b((?:TESSERA|USE|WITH|HAVE)_[A-Z0-9_]+)", re.M)

Finding = tuple[str, str]


def layer_of(path: str) -> tuple[str, int] | None:
    """Folder and layer number of a file or include path, nothing for files outside the layers."""
    folder = "/".join(path.split("/")[:2])
    return (folder, LAYERS[folder]) if folder in LAYERS else None


def check_layers(path: str, text: str) -> Iterator[Finding]:
    here = layer_of(path)
    if path == UMBRELLA:
        here = (UMBRELLA, UMBRELLA_LAYER + 1)
    if here is None:
        return
    for include in INCLUDE.findall(text):
        if include == UMBRELLA:
            if here[1] <= UMBRELLA_LAYER:
                yield path, f"includes {UMBRELLA}; only users may"
            continue
        there = layer_of(include)
        if there is None or there[0] == here[0]:
            continue
        if there[1] >= here[1]:
            yield path, f"layer {here[1]} includes {include} of layer {there[1]}"


def python_module(path: str) -> list[str]:
    """The dotted name of a Python file of the packages, in parts; that of a package is its __init__'s."""
    base = ALIAS if path.startswith(ALIAS) else "python/"
    names = path.removeprefix(base).rpartition(".")[0].split("/")
    return names[:-1] if names[-1] == "__init__" else names


def python_package(path: str) -> list[str]:
    """That of such a file."""
    return python_module(path) if path.endswith("/__init__.py") else python_module(path)[:-1]


def import_names(path: str, text: str) -> Iterator[list[str]]:
    """All that a Python file of the packages imports: absolute dotted names in parts."""
    package = python_package(path)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".") for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            yield from ([*base, name.name] for name in node.names)


def imported(path: str, text: str) -> Iterator[str]:
    """Of all imports of a Python file of the package: the module or sub-package beside __init__.py; what is neither is
    a name of __init__'s."""
    for root, *rest in import_names(path, text):
        if root == "tessera":
            yield rest[0] if rest and rest[0] in PYTHON_LAYERS else "__init__"


def check_imports(path: str, text: str) -> Iterator[Finding]:
    if not (path.startswith("python/tessera/") and path.endswith(".py")):
        return
    here = path.removeprefix("python/tessera/").removesuffix(".py").split("/")[0]
    if here not in PYTHON_LAYERS:
        yield path, "is in no layer of the package: give it a place in PYTHON_ORDER of tools/check_layers.py"
        return
    layer = PYTHON_LAYERS[here]
    for there in imported(path, text):
        if there != here and PYTHON_LAYERS[there] >= layer:
            yield path, f"layer {layer} of the package imports {there} of layer {PYTHON_LAYERS[there]}"


def check_alias(path: str, text: str) -> Iterator[Finding]:
    if not (path.startswith("python/tessera/") and path.endswith(".py")):
        return
    for node in ast.walk(ast.parse(text)):
        names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
        if any(name.split(".")[0] == ALIAS_NAME for name in names):
            yield path, f"imports {ALIAS_NAME}: only {ALIAS} is above the package (layer 10)"


def python_files(files: dict[str, str]) -> dict[str, str]:
    return {
        path: text for path, text in files.items() if path.startswith(PYTHON_ROOTS) and path.endswith((".py", ".pyi"))
    }


def circles_of(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The largest sets of nodes that reach each other."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        found, ahead = set[str](), [start]
        while ahead:
            new = graph[ahead.pop()] - found
            found |= new
            ahead += new
        reached[start] = found
    return {frozenset(o for o in far if start in reached[o]) for start, far in reached.items() if start in far}


def check_circles(files: dict[str, str]) -> Iterator[Finding]:
    modules = {".".join(python_module(path)): path for path in python_files(files)}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = [] if path.endswith(".pyi") else import_names(path, files[path])  # stubs are parts of one module
        imports = [(".".join(names), ".".join(names[:-1])) for names in found]
        graph[name] = {whole if whole in modules else module for whole, module in imports} & modules.keys() - {name}
    for circle in circles_of(graph):
        yield modules[min(circle)], f"is in a circle of imports: {' '.join(sorted(circle))}"


def check_private(files: dict[str, str]) -> Iterator[Finding]:
    plain = [python_module(path) for path in python_files(files) if not path.endswith("/__init__.py")]
    for path, text in python_files(files).items():
        package = python_package(path)
        for names in import_names(path, text):
            private = [names[:at] for at, name in enumerate(names) if PRIVATE.match(name)]
            owners = [owner[:-1] if owner in plain else owner for owner in private]
            if names[0] in ("tessera", ALIAS_NAME) and any(owner != package[: len(owner)] for owner in owners):
                yield path, f"imports {'.'.join(names)}, which is private to its package"


def defined_names(tree: ast.Module) -> Iterator[str]:
    """What a file gives names to: modules' and classes' names, and what methods store in their own object. Not what a
    Protocol asks of others."""
    scopes: list[ast.AST] = [tree]
    for scope in scopes:
        for node in getattr(scope, "body", []):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            if isinstance(node, ast.ClassDef) and not any("Protocol" in ast.unparse(base) for base in node.bases):
                scopes.append(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                yield from (part.id for part in ast.walk(node) if isinstance(part, ast.Name) and is_stored(part))
    yield from (
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_own(node) and is_stored(node)
    )


def is_stored(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def is_own(node: ast.Attribute) -> bool:
    """Of the method's own object: self.x, cls.x, super().x."""
    return ast.unparse(node.value) in ("self", "cls", "super()")


def check_attributes(files: dict[str, str]) -> Iterator[Finding]:
    trees = {path: ast.parse(text) for path, text in python_files(files).items() if path.endswith(".py")}
    owners: dict[str, set[str]] = {}  # name -> the packages that define it
    for path, tree in trees.items():
        for name in filter(PRIVATE.match, defined_names(tree)):
            owners.setdefault(name, set()).add(".".join(python_package(path)))
    for path in trees:  # modules, by their whole names
        *package, name = python_module(path)
        if PRIVATE.match(name):
            owners[".".join([*package, name])] = {".".join(package)}
    for path, tree in trees.items():
        package = python_package(path)
        above = {".".join(package[:end]) for end in range(1, len(package) + 1)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and not is_own(node):
                text = ast.unparse(node)
                found = owners.get(text, owners.get(node.attr, above))
                if not found & above:
                    yield f"{path}:{node.lineno}", f"names {text}, which is private to {', '.join(sorted(found))}"


def private_names(text: str, attributes: set[str]) -> set[str]:
    """Names with an underscore that a test takes out of the package, by import, from a module or in a text; and those
    of `attributes`, which objects of the package have, as the test writes them."""
    found, modules = set(), {"tessera": "tessera"}  # what a name of the test stands for
    nodes = list(ast.walk(ast.parse(text)))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("tessera", ALIAS_NAME):
            names = {f"{node.module}.{name.name}": name.asname or name.name for name in node.names}
            modules |= {name: full for full, name in names.items() if full.startswith("tessera.")}
            found |= names.keys()
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.split(".")[0] in ("tessera", ALIAS_NAME)}
        elif isinstance(node, ast.Constant) and re.fullmatch(r"tessera(\.\w+)+", str(node.value)):
            found.add(node.value)
    own = set(defined_names(ast.parse(text)))
    for node in nodes:
        path, whole = [], node
        while isinstance(node, ast.Attribute):
            path.insert(0, node.attr)
            node = node.value
        if path and isinstance(node, ast.Name) and node.id in modules:
            found.add(".".join([modules[node.id], *path]))
        elif path and path[-1] in attributes - own and not is_own(whole):
            found.add(ast.unparse(whole))
    return {match[1] for name in found if (match := re.match(r"(.*?\._(?!_)\w+)", name))}


def attributes_of_objects(files: dict[str, str]) -> set[str]:
    """Names with an underscore that objects of the package have, and those of the alias, which are DeepSpeed's, not."""
    ours: set[str] = set()
    theirs: set[str] = set()
    for path, text in python_files(files).items():
        if path.endswith(".py"):
            names = theirs if path.startswith(ALIAS) else ours
            names.update(filter(PRIVATE.match, defined_names(ast.parse(text))))
    return ours - theirs


def check_private_in_tests(files: dict[str, str]) -> Iterator[Finding]:
    attributes = attributes_of_objects(files)
    for path, text in files.items():
        if path.startswith("tests/") and path.endswith(".py") and not path.startswith("tests/tools/"):
            found, allowed = private_names(text, attributes), PRIVATE_IN_TESTS.get(path, set())
            for name in sorted(found - allowed):
                yield path, f"uses {name}, which is private: go through what users call, or test the C++ that is bound"
            for name in sorted(allowed - found):
                yield path, f"does not use {name} any more: take it out of PRIVATE_IN_TESTS"


def check_doors(path: str, text: str) -> Iterator[Finding]:
    python = path.startswith(PYTHON_ROOTS)
    if layer_of(path) is None and not python:
        return
    code = PYTHON_COMMENT.sub("", text) if python else COMMENT.sub("", text)
    for name, (pattern, allowed) in (PYTHON_DOORS if python else DOORS).items():
        match = pattern.search(code)
        if match and not path.startswith(allowed):
            yield path, f"uses '{match.group(0)}': only {', '.join(allowed)} may name {name}"


def check_length(path: str, text: str) -> Iterator[Finding]:
    lines = text.count("\n")
    if lines > MAX_LINES:
        yield path, f"{lines} lines; the limit is {MAX_LINES}"


def wanted_test(path: str) -> str | None:
    """The test that `path` must have; a folder, with "/" at the end, for one test at least inside."""
    folder, _, name = path.rpartition("/")
    stem = Path(path).stem
    if path.startswith("tessera/") and path.endswith(".cpp"):
        return f"tests/{folder.removeprefix('tessera/')}/"
    if path.startswith("commands/") and path.endswith(".cpp"):
        return "tests/commands/"
    if path.startswith("tools/") and path.endswith(".py"):
        return f"tests/tools/test_{stem}.py"
    if folder.startswith("python/tessera/") and name.endswith(".py"):
        return f"tests/python/{folder.removeprefix('python/tessera/')}/"
    if folder == "python/deepspeed_alias/deepspeed" and name.endswith(".py"):
        return "tests/python/deepspeed_alias/"
    if folder == "python/tessera" and name.endswith(".py") and not stem.startswith("__"):
        return f"tests/python/test_{stem.lstrip('_')}.py"
    return None


def check_tests(files: dict[str, str]) -> Iterator[Finding]:
    tests = [path for path in files if path.endswith("_test.cpp") or Path(path).name.startswith("test_")]
    there = {*tests, *(path.rpartition("/")[0] + "/" for path in tests)}
    for path in files:
        wanted = wanted_test(path)
        if wanted is not None and wanted not in there:
            yield path, f"has no test {wanted}"


PYTHONS_WORDS = re.compile(
    r"=(True|False|None)\b|\btessera\.(zero|state)\.|\bzero\.Init\b|\bmodifier_rank="
    r"|context manager|\b(clip_grad_norm_|coalesce_grad_reduction|kwargs)\b"
)
OF_PYTHON = ("tessera/config/", "tessera/checkpoint/deepspeed/names.cpp")  # keys are explained by what Python has


def check_words(path: str, text: str) -> Iterator[Finding]:
    if not path.startswith("tessera/") or path.startswith(OF_PYTHON) or Path(path).suffix not in {".cpp", ".h"}:
        return
    for number, line in enumerate(text.splitlines(), 1):
        said = "" if line.lstrip().startswith("//") else " ".join(re.findall(r'"((?:[^"\\]|\\.)*)"', line))
        if PYTHONS_WORDS.search(said) and not re.search(r"Python|C\+\+", said):
            yield path, f"line {number}: a text of both front ends in Python's spelling: {said!r}"


def check_paths(path: str, text: str) -> Iterator[Finding]:
    for match in MACHINE_PATH.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield f"{path}:{line}", f"names a path of one machine: {match.group(0)}..."


def check_optional(path: str, text: str) -> Iterator[Finding]:
    if path.startswith(("tessera/", "python/src/")):
        for match in CONDITIONAL.finditer(text):
            if re.search(rf"#\s*define\s+{match.group(1)}\b", text):
                continue  # the file's own macro, not a switch of the build
            line = text.count("\n", 0, match.start()) + 1
            yield f"{path}:{line}", "conditional code for an optional part: use two files chosen by CMake"


MACRO = re.compile(r"^\s*#\s*define\s+(TESSERA_\w+)", re.M)


def check_macros(files: dict[str, str]) -> Iterator[Finding]:
    """A build that compiles several files as one does not see that an include is missing, or sees it by chance."""
    sources = {
        path: COMMENT.sub("", text)
        for path, text in files.items()
        if path.startswith(("tessera/", "python/src/")) and Path(path).suffix in CXX_SUFFIXES
    }
    macros: dict[str, set[str]] = {}  # -> the headers that define it
    for path, text in sources.items():
        for name in MACRO.findall(text):
            macros.setdefault(name, set()).add(path)
    for path, text in sources.items():
        reached, left = {path}, [path]
        while left:
            included = {one for one in INCLUDE.findall(sources[left.pop()]) if one in sources} - reached
            reached |= included
            left += included
        for name in sorted(set(re.findall(r"\bTESSERA_\w+", text)) & macros.keys()):
            if reached.isdisjoint(macros[name]) and not path.endswith(".inc"):
                yield path, f"uses {name} and does not include {' or '.join(sorted(macros[name]))}"


def tracked_files(root: Path) -> dict[str, str]:
    """Text files git knows, tracked or new but not ignored: path relative to `root` -> content."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root, check=True, capture_output=True, text=True,
    )  # fmt: skip
    files = {}
    for name in listing.stdout.splitlines():
        path = root / name
        if path.suffix in TEXT_SUFFIXES and path.is_file():
            try:
                files[name] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
    return files


def check_all(files: dict[str, str]) -> list[Finding]:
    findings: list[Finding] = []
    for path, text in files.items():
        findings += check_paths(path, text)
        suffix = Path(path).suffix
        if suffix in CXX_SUFFIXES:
            findings += check_layers(path, text)
            findings += check_words(path, text)
            findings += check_optional(path, text)
        if suffix in CXX_SUFFIXES | {".py", ".pyi"}:
            findings += check_doors(path, text)
            findings += check_length(path, text)
        findings += check_imports(path, text)
        findings += check_alias(path, text)
    findings += check_circles(files)
    findings += check_private(files)
    findings += check_attributes(files)
    findings += check_tests(files)
    findings += check_private_in_tests(files)
    findings += check_macros(files)
    return findings


def main(argv: list[str]) -> int:
    root = Path(argv[1] if len(argv) > 1 else Path(__file__).parents[1])
    files = tracked_files(root)
    findings = check_all(files)
    for path, message in findings:
        print(f"{path}: {message}")
    print(f"check_layers: {len(files)} files, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
