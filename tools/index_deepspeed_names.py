#!/usr/bin/env python3
"""Writes the list of the modules of DeepSpeed and of what each has, which the alias package answers for.

usage: index_deepspeed_names.py FOLDER VERSION     FOLDER: the package `deepspeed`, of a source archive or installed

Sources are parsed, not run. A line without indentation is a module, "." the package; below it stand its own names, and
after "from MODULE:" those that it takes from another one (* all of them). NAME= is a value, NAME=1 a constant that is a
plain number or word, NAME~ the name in lower case, NAME@MODULE.OTHER a module or what is called otherwise where it is
from. Private values are there where another module takes them.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

HEAD = (
    "# Modules and names of DeepSpeed {version}, written by tools/index_deepspeed_names.py, which says how to read them"
)
WORD = re.compile(r"[\w.+-]{0,60}")
Names = dict[str, str]  # name -> what follows it in the list


class Module:
    """What one source file binds."""

    def __init__(self, name: str, is_package: bool, tree: ast.Module) -> None:
        self.name = name
        self.package = name if is_package else name.rpartition(".")[0]
        self.own: Names = {}
        self.taken: dict[str, tuple[str, str]] = {}  # name -> (module, its name there)
        for statement in _statements(tree.body):
            self._bind(statement)

    def _bind(self, statement: ast.stmt) -> None:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self.own[statement.name] = ""
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(part, ast.Name):
                        whole = not isinstance(target, ast.Tuple)
                        self.own.setdefault(part.id, _value(part.id, statement.value if whole else None))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            self.own.setdefault(statement.target.id, _value(statement.target.id, statement.value))
        elif isinstance(statement, ast.ImportFrom):
            source = self._source(statement)
            for alias in statement.names if source else []:
                name = source if alias.name == "*" else alias.asname or alias.name
                self.taken.setdefault(name, (source, alias.name))

    def _source(self, statement: ast.ImportFrom) -> str:
        """The module that is imported from, "" for one that is not DeepSpeed's."""
        if statement.level:
            base = self.package.split(".")[: len(self.package.split(".")) - statement.level + 1]
            return ".".join([*base, *([statement.module] if statement.module else [])])
        source = statement.module or ""
        return source if source.split(".")[0] == "deepspeed" else ""


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, and of its branches."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With, ast.For)):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


def _value(name: str, node: ast.expr | None) -> str:
    try:
        value = ast.literal_eval(node) if node is not None and name.isupper() else ...
    except ValueError:
        return "="
    if isinstance(value, str) and WORD.fullmatch(value):
        return "~" if value == name.lower() else f"={json.dumps(value)}"
    return f"={json.dumps(value)}" if value is None or isinstance(value, (bool, int, float)) else "="


def modules_of(folder: Path) -> dict[str, Module]:
    found = {}
    for path in sorted(folder.rglob("*.py")):
        if path.name == "git_version_info_installed.py":  # of an installation only
            continue
        parts = ["deepspeed", *path.relative_to(folder).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found[name] = Module(name, is_package, ast.parse(path.read_text()))
    return found


def _binds(modules: dict[str, Module], name: str, what: str) -> bool:
    """`what` is of the module, or it takes it from another: nothing of Python's or torch's."""
    module = modules[name]
    through = [source for source, original in module.taken.values() if original == "*" and source in modules]
    return what in ("*", *module.own, *module.taken) or any(_binds(modules, source, what) for source in through)


def rows_of(modules: dict[str, Module], name: str, wanted: set[str]) -> dict[str, list[str]]:
    """Of a module: "" -> its own names, another module -> what it takes from that one."""
    module = modules[name]
    rows: dict[str, list[str]] = {"": []}
    for key, (source, original) in sorted(module.taken.items()):
        is_module = f"{source}.{original}" in modules
        if is_module and not key.startswith("_"):
            rows[""].append(f"{key}@{_short(f'{source}.{original}')}")
        elif source in modules and original in (key, "*") and _binds(modules, source, original):
            rows.setdefault(source, []).append(original)
        elif source in modules and not key.startswith("_"):
            there = _binds(modules, source, original)
            rows[""].append(f"{key}@{_short(source)}.{original}" if there else f"{key}=")
    for key, mark in sorted(module.own.items()):
        if key.startswith("__") or (key.startswith("_") and mark and key not in wanted):
            continue
        if key not in module.taken:
            rows[""].append(key + mark)
    return rows


def _short(name: str) -> str:
    return name.removeprefix("deepspeed") or "."


def lines(modules: dict[str, Module]) -> Iterator[str]:
    wanted = {original for module in modules.values() for _, original in module.taken.values()}
    for name in modules:
        yield _short(name)
        for source, words in rows_of(modules, name, wanted).items():
            start = f"  from {_short(source)}: " if source else "  "
            later = "    " if source else "  "
            text = " ".join(words)
            yield from textwrap.wrap(
                text, 160, initial_indent=start, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
            )


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    print(HEAD.format(version=sys.argv[2]), *lines(modules_of(Path(sys.argv[1]))), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
