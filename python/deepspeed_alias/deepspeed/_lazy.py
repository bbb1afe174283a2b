"""Modules made of the table in _table.py, and of DeepSpeed's other names, which are refused: a name is looked up, and
what it needs imported, when it is first used."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any, NoReturn

from deepspeed import _names
from deepspeed._table import MODULES

ROOT = __name__.split(".")[0]


class NotServed(NotImplementedError, AttributeError):
    """The user asked for something that Tessera does not serve. (An AttributeError too: hasattr() says False.)"""


class _RefusingType(type):
    _says: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotServed(cls._says)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotServed(cls._says)

    def __instancecheck__(cls, instance: object) -> bool:
        return False


class _RefusingValue(_RefusingType):
    """Stands for what is no class and no function."""


def _refuse(cls: _RefusingType, *args: Any) -> NoReturn:
    raise NotServed(cls._says)


for _name in ("bool", "len", "iter", "getitem", "contains", "int", "float", "index", "add", "sub", "mul", "lt", "gt"):
    setattr(_RefusingValue, f"__{_name}__", _refuse)


def refusing(name: str, feature: str, is_value: bool = False) -> type:
    """Makes what stands for a name that is not served: importable, no object is an instance of it, any use is an error.
    An exception can be named in an `except`, though it is never raised."""
    says = f"[deepspeed] {name} is not served by Tessera: {feature}; see docs/migrate_from_deepspeed.md"
    last = name.rpartition(".")[2]
    bases = (Exception,) if last.endswith(("Error", "Exception")) and not is_value else ()
    kind = _RefusingValue if is_value else _RefusingType
    return kind(last, bases, {"_says": says, "__doc__": says, "__module__": ROOT})


def resolve(module: str, name: str, target: str) -> Any:
    """The object of a row. A target is "path:attribute", "path" (a module), "=text" (that text), "!feature" (refused)
    or "path:attribute!feature" (refused where this Tessera has no such attribute). A path "." is this package's."""
    if target.startswith("="):
        return target[1:]
    where, refused, feature = target.partition("!")
    try:
        if where:
            path, _, attribute = where.partition(":")
            found: Any = importlib.import_module(path, ROOT)
            for part in attribute.split(".") if attribute else []:
                found = getattr(found, part)
            return found
    except (ImportError, AttributeError):
        if not refused:
            raise
    return refusing(f"{module}.{name}", feature)


class AliasModule(types.ModuleType):
    """A module whose names are rows of the table."""

    def __getattr__(self, name: str) -> Any:
        value = attribute(self.__name__, name)
        self.__dict__[name] = value
        return value

    def __dir__(self) -> list[str]:
        return names_of(self.__name__)


def names_of(module: str) -> list[str]:
    below = f"{module}."
    children = {key[len(below) :].split(".")[0] for key in (*MODULES, *_names.index()) if key.startswith(below)}
    return sorted({*_rows_of(module), *_names_beside(module), *children})


def _rows_of(module: str) -> list[str]:
    return [name for name in MODULES.get(module, {}) if name not in ("*", "=")]


def _names_beside(module: str) -> dict[str, _names.Entry]:
    """DeepSpeed's names in this module, and in those that are other names of it."""
    found: dict[str, _names.Entry] = {}
    for name in [module, *(key for key, rows in MODULES.items() if rows.get("=") == module)]:
        found.update(_names.index().get(name, {}))
    return found


def attribute(module: str, name: str) -> Any:
    """Returns what `from module import name` gives: a row, a module below, something of the module that row "*" names,
    or what stands for a name of DeepSpeed's."""
    rows = MODULES.get(module, {})
    if name in rows:
        return resolve(module, name, rows[name])
    if f"{module}.{name}" in MODULES or f"{module}.{name}" in _names.index():
        return importlib.import_module(f"{module}.{name}")
    if "*" in rows and not name.startswith("__"):
        found = importlib.import_module(rows["*"], ROOT)
        if hasattr(found, name):
            return getattr(found, name)
    entry = _names_beside(module).get(name)
    if entry is not None:
        return _beside(module, name, entry)
    raise AttributeError(
        f"module '{module}' has no attribute '{name}': not one of the names that are served; see "
        "docs/migrate_from_deepspeed.md"
    )


def _beside(module: str, name: str, entry: _names.Entry) -> Any:
    """The value of a name that has no row here: its value where it comes from, or in a module that takes it from
    here."""
    if entry.source and entry.source != module:
        return attribute(entry.source, name)
    if entry.other:
        source, _, original = entry.other.rpartition(".")
        return importlib.import_module(entry.other) if entry.other in _names.index() else attribute(source, original)
    for taker in _names.takers(module, name):
        rows = MODULES.get(taker, {})
        if name in rows:
            return resolve(taker, name, rows[name])
        if "*" in rows:
            found = importlib.import_module(rows["*"], ROOT)
            if hasattr(found, name):
                return getattr(found, name)
    if entry.is_known:
        return entry.value(name)
    return refusing(f"{module}.{name}", _names.why(module), entry.mark == "=")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the table and of the list of names, which are no files."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != ROOT:  # an import that nobody else has found
            return None
        module, _, last = fullname.rpartition(".")
        if last == "__main__" and "main" in MODULES.get(module, {}):  # for `python -m module`
            return importlib.machinery.ModuleSpec(fullname, self, origin="Tessera")
        if fullname not in MODULES and fullname not in _names.index():
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin="Tessera")
        spec.submodule_search_locations = []  # any module may have modules below
        return spec

    def get_code(self, fullname: str) -> types.CodeType:
        """The code of `python -m module`: the module's main()."""
        module = fullname.rpartition(".")[0]
        return compile(f"import sys\nfrom {module} import main\nsys.exit(main())", "Tessera", "exec")

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return AliasModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        rows = MODULES.get(module.__name__, {})
        if "=" in rows:  # another name of a module; the import system takes what is here afterwards
            sys.modules[module.__name__] = importlib.import_module(rows["="])
        else:
            names = {**dict.fromkeys(_rows_of(module.__name__)), **_names_beside(module.__name__)}
            module.__all__ = [name for name in names if not name.startswith("_")]  # type: ignore[attr-defined]


def install() -> None:
    """Installs the finder once for this package, however often it is imported."""
    if not any(type(finder).__module__ == Finder.__module__ for finder in sys.meta_path):
        sys.meta_path.append(Finder())
