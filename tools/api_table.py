"""The pages docs/api*.md: each public name of Python beside the C++ one that does the same, or why there is none.

    python tools/api_table.py             writes the pages, of the list tools/api_pairs.txt
    python tools/api_table.py --check     the list has all public names and no others, and the pages are the list's

Nothing is imported or compiled. Names of Python: `__all__` of modules without an underscore, and the members of their
classes. Names of C++: what the headers declare that tessera/*.h include, and those of WITH.

What a class has from a public base needs no line of its own: the base's line says what it is. Where that is a member
of the C++ class that stands for the base, the one that stands for the derived class must have it, too, or a line says
why not. Arguments of a function and fields of a struct are compared where a line pairs one, F(x) with S::y: then all of
F and of S must have a line.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIST = Path("tools/api_pairs.txt")
ALONE = ("docs/api_alone.md", "Names that Python or C++ alone has")

# Modules without an underscore that sub-packages of Python have for each other.
INSIDE = re.compile(r"(.*\.)?engines|engine\.front|engine\.program")
# Bases of public classes of C++, and what their methods return or take.
WITH = """amp/grad_scaler engine/engine engine/restore engine/scaling engine/watch io/metrics nn/outputs nn/session
nn/units pipeline/link pipeline/link_end pipeline/wire zero/modules zero/regions zero/state_access"""

HEAD = """
What public names of one front end are in the other. `tools/api_table.py` writes this page of `tools/api_pairs.txt`, and
`make lint` fails where a name is missing. Names of Python are below `tessera.`, those of C++ below `tessera::`, with
the class that has them: an `nn::Engine` is an `nn::Session`, and its `core()` an `engine::Engine`. `X.*` and `X::*` are
X and what it has without a row of its own, `X.{a, b}` is X and these, `F(x)` an argument of F. What a class has from
its base is in the base's row. Keys of the configuration: [config_keys.md](config_keys.md).
"""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, root: Path) -> Iterator[tuple[Path, str, str]]:
    """File, name there and name here of what a file imports from the package."""
    for node in parsed(path).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            base = root / "python" / node.module.replace(".", "/")
            files = filter(Path.exists, (base / "__init__.py", base.with_suffix(".py"), base.with_suffix(".pyi")))
            yield from ((file, alias.name, alias.asname or alias.name) for file in files for alias in node.names)


def class_of(path: Path, name: str, root: Path) -> tuple[Path, ast.ClassDef] | None:
    """Where the class that a file has or imports is defined."""
    for node in parsed(path).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return path, node
    others = ((file, there) for file, there, here in imports(path, root) if here == name and file != path)
    return next((class_of(file, there, root) for file, there in others), None)


def members(path: Path, node: ast.ClassDef, public: set[str], root: Path) -> set[str]:
    """With those of bases that are not public; without those that a public base has."""
    found, others = set(), set()
    for part in node.body:
        stored = [n for n in ast.walk(part) if isinstance(getattr(n, "ctx", None), ast.Store)]
        if isinstance(part, ast.FunctionDef):
            own = [n for n in stored if part.name == "__init__" and re.fullmatch(r"self\.\w+", ast.unparse(n))]
            found |= {part.name} | {n.attr for n in own if isinstance(n, ast.Attribute)}
        elif isinstance(part, ast.Assign | ast.AnnAssign):
            found |= {n.id for n in stored if isinstance(n, ast.Name)}
    for base in node.bases:
        # Not those of compiled classes: the keys of a configuration.
        if path.suffix == ".py" and isinstance(base, ast.Name) and (at := class_of(path, base.id, root)) is not None:
            (others if base.id in public else found).update(members(*at, public, root))
    return {name for name in found - others if not name.startswith("_")}


def bases(path: Path, node: ast.ClassDef, public: set[str], root: Path) -> set[str]:
    """The public ones, also those of bases that are not, and of public ones."""
    found = set()
    for base in node.bases:
        if path.suffix == ".py" and isinstance(base, ast.Name) and (at := class_of(path, base.id, root)) is not None:
            found |= ({base.id} & public) | bases(*at, public, root)
    return found


def functions(path: Path, node: ast.AST, name: str, root: Path) -> Iterator[ast.FunctionDef]:
    """The definitions of a name in a module or a class, also where that is a method of another class."""
    for part in getattr(node, "body", []):
        if isinstance(part, ast.FunctionDef) and part.name == name:
            yield part
        elif isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == name and isinstance(part.value, ast.Call):
            for of in part.value.args[-1:]:
                if isinstance(of, ast.Attribute) and isinstance(of.value, ast.Name):
                    at = class_of(path, of.value.id, root)
                    yield from functions(*at, of.attr, root) if at else ()


def arguments(made: Iterator[ast.FunctionDef]) -> set[str]:
    named = (arg.arg for one in made for arg in (*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs))
    return {name for name in named if name not in ("self", "cls") and name[0] != "_"}


@dataclass
class Python:
    names: set[str]  # without "tessera."
    bases: dict[str, set[str]]  # of a class, the names of its public bases
    arguments: set[str]  # "F(x)"


def python_names(root: Path = ROOT) -> Python:
    """A name that several modules have is that of the outer one."""
    package = root / "python" / "tessera"
    listed: dict[Path, set[str]] = {}
    modules: dict[Path, str] = {}
    for path in sorted(package.rglob("*.py"), key=lambda path: (path.parent, path.name != "__init__.py", path)):
        parts = path.relative_to(package).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        if INSIDE.fullmatch(module) or any(part.startswith("_") for part in module.split(".")):
            continue
        for node in parsed(path).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                texts = (part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant))
                listed[path], modules[path] = {str(text) for text in texts}, module
    listed[package / "__init__.py"] -= set(modules.values())
    for path, names in listed.items():
        for file, there, here in imports(path, root):
            if there == "*":
                names |= listed.get(file, set())
                listed[file] = set()
            elif here in names and file != path and file in listed:
                listed[file].discard(there)
    public = set().union(*listed.values())
    full = {(path, name): f"{modules[path]}.{name}".lstrip(".") for path, names in listed.items() for name in names}
    known = Python(set(full.values()), {}, set())
    for (path, name), called in full.items():
        at = class_of(path, name, root)
        holders = {called: (*at, "__init__")} if at else {called: (*defined(path, name, root), name)}
        if at is not None:
            own = members(*at, public, root)
            known.names |= {f"{called}.{member}" for member in own}
            inherited = bases(*at, public, root)
            known.bases[called] = {other for (_, base), other in full.items() if base in inherited}
            holders |= {f"{called}.{member}": (*at, member) for member in own}
        for of, (file, node, what) in holders.items():
            known.arguments |= {f"{of}({one})" for one in arguments(functions(file, node, what, root))}
    return known


def defined(path: Path, name: str, root: Path) -> tuple[Path, ast.Module]:
    """The file that defines a function which another one imports."""
    others = (file for file, there, here in imports(path, root) if here == name == there and file != path)
    return next((defined(file, name, root) for file in others), (path, parsed(path)))


# Comments, directives, characters and texts.
NOISE = re.compile(r"""(?sm)//[^\n]*|/\*.*?\*/|^[ \t]*#(\\\n|[^\n])*|(?<!\w)'(\\.|[^'\\])+'|"(\\.|[^"\\\n])*\"""")
BLOCK = re.compile(r"([^;{}]*)\{([^{}]*)\}(?=\s*(\S?))")
NAMESPACE = re.compile(r"(?:inline\s+)?namespace\s*([\w:]*)")
CLASS = re.compile(r"(?s)(class|struct|union)\s+(\w+)(?:\s*final)?(?:\s*:(?!:).*)?")
ENUM = re.compile(r"(?s)enum(?:\s+class|\s+struct)?\s+(\w+)(?:\s*:.*)?")
NO_NAME = re.compile(r"(?s)(friend|static_assert|using namespace)\b|(class|struct|enum)\s+\w+\s*$|.*(\boperator\b|~)")


def until_same(pattern: str | re.Pattern[str], new: Any, text: str) -> str:
    while (less := re.sub(pattern, new, text)) != text:
        text = less
    return text


def declared(body: str, kind: str, scope: str) -> Iterator[str]:
    """The names of a folded scope, below it; with "?" in front those of objects, which the list may have or not."""
    shown = kind != "class"
    for part in body.split(";"):
        part = re.sub(r"^\s*(template\s*)+", "", part).strip()
        if part.startswith("%"):
            shown = part == "%public"
        elif shown and part.startswith("@"):
            yield from part[1:].split()
        elif shown and part and not NO_NAME.match(part):
            if found := re.match(r"using\s+(?:[\w:]*::)?(\w+)\s*(=?)", part):
                yield found[1] if kind == "namespace" or not found[2] else f"?{found[1]}"
            elif found := re.search(r"([\w:]+)\s*\0", part.split("=")[0]):
                if "::" not in found[1] and found[1] != scope:  # a definition, a constructor
                    yield found[1]
            else:
                ends = (re.search(r"([A-Za-z]\w*)$", piece.split("=")[0].strip()) for piece in part.split(","))
                yield from (f"?{end[1]}" for end in ends if end)


def fold(match: re.Match[str]) -> str:
    """Of an innermost block: "@" and the names of a scope; of a body or a value nothing."""
    head = re.sub(r"^\s*(template\s*)+", "", match[1]).strip()
    if found := ENUM.fullmatch(head):
        return f";@{found[1]};"
    if found := NAMESPACE.fullmatch(head):
        kind, scope, names = "namespace", found[1], []
        if scope in ("", "detail"):
            return ";"
    elif found := CLASS.fullmatch(head):
        kind, scope, names = found[1], found[2], [found[2]]
    else:
        return match[1] + (" " if match[3] in (";", ",", "{") else ";")
    names += [re.sub(r"^(\??)", rf"\1{scope}::", name) for name in declared(match[2], kind, scope)]
    return f";@{' '.join(names)};"


DERIVED = re.compile(r"(?<!enum )\b(class|struct)\s+(\w+)(?:\s+final)?\s*:(?!:)([^{;]*)\{")


def cpp_bases(text: str) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Class, and a base with whether that is public; both are in the first namespace of a file, if they name none."""
    spaces = (name for name in NAMESPACE.findall(text) if name.startswith("tessera"))
    scope = next(spaces, "").removeprefix("tessera").removeprefix("::")
    for kind, name, listed in DERIVED.findall(text):
        for base in listed.split(","):
            of = re.search(r"([\w:]+)\s*$", base.strip())
            if of is not None:
                shown = "public" in base or (kind == "struct" and "private" not in base)
                called = of[1].removeprefix("tessera::")
                yield f"{scope}::{name}", (called if "::" in called else f"{scope}::{called}", shown)


@dataclass
class Cpp:
    names: set[str]  # without "tessera::": types and functions, which the list must have
    objects: set[str]  # which it may
    bases: dict[str, set[tuple[str, bool]]]  # of a class; True: a public one

    def has(self, name: str, member: str) -> bool:
        """Whether a program may call a member of a class, its own or that of a public base."""
        others = (base for base, shown in self.bases.get(name, ()) if shown)
        return f"{name}::{member}" in self.names or any(self.has(base, member) for base in others)


def cpp_names(root: Path = ROOT) -> Cpp:
    headers = {f"tessera/{name}.h" for name in WITH.split()}
    for public in (root / "tessera").glob("*.h"):
        headers |= set(re.findall(r'#include "(tessera/\w+/[\w/]+\.h)"', public.read_text(encoding="utf-8")))
    found: set[str] = set()
    derived: dict[str, set[tuple[str, bool]]] = {}
    for path in [root / header for header in sorted(headers) if (root / header).exists()]:
        text = NOISE.sub(" ", path.read_text(encoding="utf-8"))
        for holder in re.findall(r"\bTORCH_MODULE\((\w+)\)", text):  # class XImpl and X, its holder, are one
            text = re.sub(rf"\b{holder}Impl\b", holder, text).replace(f"TORCH_MODULE({holder});", "")
        text = until_same(r"\([^()]*\)", "\0", text.replace("->", " "))
        text = until_same(r"(?<!\w)\[[^\[\]]*\]|<[^<>;{}]*>", " ", text)
        for name, base in cpp_bases(text):
            derived.setdefault(name, set()).add(base)
        text = re.sub(r"\b(public|private|protected)\s*:(?!:)", r";%\1;", text)
        found |= set(declared(until_same(BLOCK, fold, text), "namespace", ""))
    below = {name.replace("tessera::", "", 1) for name in found if re.match(r"\??tessera::", name)}
    return Cpp({n for n in below if n[0] != "?"}, {n[1:] for n in below if n[0] == "?"}, derived)


@dataclass
class Row:
    page: tuple[str, str]  # its path and title
    topic: str
    python: list[str]
    cpp: list[str]
    text: str  # a note; where one side has no names, why


def rows_of(text: str) -> list[Row]:
    rows, page, topic = [], ("docs/api.md", "Python and C++"), ""
    for line in re.sub(r"\n[ \t]+", " ", text).splitlines():
        if line.startswith("= "):
            path, _, title = line[2:].partition(" | ")
            page = (path, title)
        elif line.startswith("# "):
            topic = line[2:]
        elif line and not line.startswith("//"):
            fields = [field.strip() for field in line.split(" | ")]
            reasons = [field[2:] for field in fields if field.startswith("- ")]
            if len(fields) + len(reasons) not in (2, 3) or len(reasons) > 1:
                raise ValueError(f"{LIST}: not a line of it: {line}")
            sides = [[] if field.startswith("- ") else re.split(r",\s*(?![^{]*\})", field) for field in fields[:2]]
            rows.append(Row(page, topic, *sides, *(reasons or fields[2:] or [""])))
            if not reasons and (wild := [name for side in sides for name in side if name.endswith("*")]):
                raise ValueError(f"{LIST}: {wild[0]} is paired; say what it has, as X.{{a, b}}: {line}")
    return rows


def expanded(names: list[str]) -> list[str]:
    """X.{a, b} is X, X.a and X.b."""
    found = []
    for name in names:
        stem, _, rest = name.partition("{")
        found += [stem.rstrip(".:"), *(stem + each.strip() for each in rest.rstrip("}").split(","))] if rest else [name]
    return found


def below(name: str) -> tuple[str, tuple[str, ...]]:
    """Of X.*: X, and with what the names begin that it has."""
    stem = re.sub(r"(\.|::)\*$", "", name)
    return stem, tuple(stem + mark for mark in (".", "::")) if stem != name else ()


def problems_of(language: str, listed: list[str], needed: set[str], others: set[str]) -> list[str]:
    """Names without a line, lines without a name."""
    problems, taken = [], set()
    for name in dict.fromkeys(listed):
        stem, begins = below(name)
        some = {one for one in needed | others if one == stem or (begins and one.startswith(begins))}
        taken |= some
        if not some:
            problems.append(f"{LIST}: {language} has no {name}; take it off the list")
    return problems + [f"{LIST}: no line has {language}'s {name}" for name in sorted(needed - taken)]


def inherited_by(rows: list[Row], known: Python, cpp: Cpp) -> tuple[set[str], set[str], list[str]]:
    """Members that classes of Python have from bases; those of C++ whose base's line counts; what C++ lacks of them."""
    lines = [(set(expanded(row.python)), expanded(row.cpp)) for row in rows]
    listed = {below(name)[0] for python, _ in lines for name in python}
    paired = {name for _, names in lines for name in names}
    members: set[str] = set()
    problems = []
    for name, of in known.bases.items():
        own = [one for python, names in lines if name in python for one in names]
        for base in of:
            classes = {one for python, names in lines if base in python for one in names}
            for member in {n.removeprefix(f"{base}.") for n in known.names if n.startswith(f"{base}.")}:
                members.add(f"{name}.{member}")
                there = [one for python, names in lines if f"{base}.{member}" in python for one in names]
                there = [one.rpartition("::")[2] for one in there if one.rpartition("::")[0] in classes]
                has = any(cpp.has(one, each) for one in own for each in there)
                if own and there and not has and f"{name}.{member}" not in listed:
                    problems.append(
                        f"{LIST}: no line has Python's {name}.{member}, which it has from {base}; of {', '.join(own)} "
                        f"none has {' or '.join(dict.fromkeys(there))}"
                    )
    through = {
        one
        for one in cpp.names
        for base, _ in cpp.bases.get(one.rpartition("::")[0], ())
        if f"{base}::{one.rpartition('::')[2]}" in paired
    }
    return members, through, sorted(problems)


def of_calls(rows: list[Row], known: Python, cpp: Cpp) -> tuple[set[str], set[str]]:
    """Arguments and fields that need a line: of the functions and structs of which a line pairs some."""
    calls = {name.partition("(")[0] for row in rows for name in row.python if "(" in name}
    fields = {name for row in rows if any("(" in one for one in row.python) for name in row.cpp}
    structs = {name.rpartition("::")[0] for name in fields & cpp.objects}
    return (
        {one for one in known.arguments if one.partition("(")[0] in calls},
        {one for one in cpp.objects if one.rpartition("::")[0] in structs},
    )


def pages_of(rows: list[Row]) -> dict[Path, str]:
    def table(title: str, head: str, lines: list[list[str]]) -> str:
        rule = "|" + "---|" * (head.count("|") - 1)
        return "\n".join(["", f"## {title}", "", head, rule, *("| " + " | ".join(line) + " |" for line in lines), ""])

    def code(names: list[str]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    titles = [*dict.fromkeys(row.page for row in rows), ALONE]
    pages = {}
    for own in titles:
        others = [f"[{Path(path).name}]({Path(path).name}) ({title})" for path, title in titles if path != own[0]]
        pages[Path(own[0])] = f"# {own[1]}\n{HEAD}Other pages:\n" + ",\n".join(others) + ".\n"
    for page, topic in dict.fromkeys((row.page, row.topic) for row in rows):
        both = [row for row in rows if row.topic == topic and row.python and row.cpp]
        lines = [[code(row.python), code(row.cpp), row.text] for row in both]
        if lines:
            pages[Path(page[0])] += table(topic, "| Python | C++ | |", lines)
    for side, other in (("Python", "cpp"), ("C++", "python")):
        alone = [[row.topic, code(row.python + row.cpp), row.text] for row in rows if not getattr(row, other)]
        pages[Path(ALONE[0])] += table(f"In {side} alone", "| topic | names | why |", alone)
    return pages


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    if (arguments := sys.argv[1:] if argv is None else argv) not in ([], ["--check"]):
        sys.exit(__doc__)
    rows = rows_of((root / LIST).read_text(encoding="utf-8"))
    known, cpp = python_names(root), cpp_names(root)
    members, through, problems = inherited_by(rows, known, cpp)
    called, fields = of_calls(rows, known, cpp)
    python = [name for row in rows for name in expanded(row.python)]
    problems += problems_of("Python", python, known.names | called, members | known.arguments)
    others = cpp.objects - fields | cpp.names & through
    problems += problems_of("C++", [n for row in rows for n in expanded(row.cpp)], cpp.names - through | fields, others)
    for page, text in pages_of(rows).items():
        if not arguments:
            (root / page).write_text(text, encoding="utf-8")
        elif not (root / page).exists() or (root / page).read_text(encoding="utf-8") != text:
            problems.append(f"{page} is not what {LIST} says; run python tools/api_table.py")
    print("\n".join(problems), end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
