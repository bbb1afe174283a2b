"""Values that go to other ranks: any nesting of tensors as a list of these and a note, which says in JSON how they are
nested.

In a note tensors are ["tensor"], in the order of the list; lists are ["list", [...]], and so are "tuple" and "dict" (of
pairs); an object of another class is ["of", module, name, [...]], as a named tuple. Numbers, texts and None are
themselves."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tessera.errors import UsageError

_PLAIN = (bool, int, float, str)


@dataclass(frozen=True)
class Nesting:
    """Takes values apart and joins them. In errors: who has made a value, between whom it goes, and its sender."""

    origin: str
    made: str
    between: str
    other: str
    error: type[Exception] = UsageError

    def split(self, value: Any) -> tuple[list[torch.Tensor], str]:
        """The tensors of `value`, and its note."""
        tensors: list[torch.Tensor] = []
        return tensors, json.dumps(self._fold(value, tensors))

    def join(self, note: str, tensors: list[torch.Tensor]) -> Any:
        """The value that split() took apart."""
        return self._unfold(_parsed(note), iter(tensors))

    def _fold(self, value: Any, tensors: list[torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return ["tensor"]
        if isinstance(value, dict):
            return ["dict", [[self._key(key), self._fold(item, tensors)] for key, item in value.items()]]
        if isinstance(value, (tuple, list)):
            kind, items = type(value), [self._fold(item, tensors) for item in value]
            return (
                [kind.__name__, items] if kind in (tuple, list) else ["of", kind.__module__, kind.__qualname__, items]
            )
        if value is None or isinstance(value, _PLAIN):
            return value
        raise self.error(
            f"[{self.origin}] {self.made} a {type(value).__name__}; between {self.between} go tensors, numbers, texts, "
            "None, and tuples, lists and dicts of them"
        )

    def _key(self, key: Any) -> Any:
        if key is None or isinstance(key, _PLAIN):
            return key
        if type(key) is tuple:
            return ["tuple", [self._key(part) for part in key]]
        raise self.error(
            f"[{self.origin}] {self.made} a dict with the key {key!r}; keys are numbers, texts, None and tuples of them"
        )

    def _unfold(self, form: Any, tensors: Iterator[torch.Tensor]) -> Any:
        if not isinstance(form, list):
            return form
        kind, *rest = form
        if kind == "tensor":
            return next(tensors)
        if kind == "dict":
            return {self._unfold(key, tensors): self._unfold(item, tensors) for key, item in rest[0]}
        items = (self._unfold(item, tensors) for item in rest[-1])
        if kind != "of":
            return tuple(items) if kind == "tuple" else list(items)
        made = self._class(*rest[:2])
        return made(*items) if hasattr(made, "_fields") else made(items)

    def _class(self, module: str, name: str) -> Any:
        """A class of tuples or lists that this process has imported; a message imports nothing."""
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if isinstance(found, type) and issubclass(found, (tuple, list)):
            return found
        raise self.error(
            f"[{self.origin}] another {self.other} sent a {module}.{name}; import it on all {self.between}, at a "
            "module's top level"
        )


@functools.lru_cache(maxsize=64)
def _parsed(note: str) -> Any:
    return json.loads(note)
