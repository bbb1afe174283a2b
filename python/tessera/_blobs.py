"""What a checkpoint has beside tensors, as files of torch.save in memory, made so that torch.load reads them with
weights_only, which runs nothing: NumPy's numbers become Python's; its arrays and io.BytesIO go as dicts of one key, and
come back as they were."""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.jit import _pickle

from tessera import _core
from tessera.errors import ConfigError, IoError

TRUST = "If you trust it, pass trusted=True (--trusted on the command line), which can run code"
# In the blob "optimizer-N", beside the states of a parameter that are neither one number nor one for each element: what
# of the parameter they are of, by cut_of().
CUT = "tessera.cut"
LARGEST = 1 << 53  # number that a file can have, as in checkpoint/node.h
LARGEST_COUNT = LARGEST // 2  # the largest of what goes on counting from there
# Kinds of tensors that are no optimizer's states.
OWN_KINDS = frozenset({"weight", "master", "buffer", "rank_buffer", "gradient", "partial_gradient"})
_ARRAY, _STREAM = "numpy.ndarray", "io.BytesIO"
_PLAIN = (bool, int, float, complex, str, bytes)


def pickled(value: Any, what: str) -> bytes:
    """ConfigError that says `what`, and of a dict all keys whose values cannot be pickled."""
    try:
        return _bytes_of(value)
    except Exception as error:  # any kind of error that objects of a client have
        ours = isinstance(error, pickle.PicklingError) or "pickle" in str(error)  # else of an object's own code
        wrong = _wrong_keys(value) or str(error)
        raise ConfigError(f"[checkpoint] {what} holds what Python's pickle cannot save: {wrong}") from (
            None if ours else error
        )


def _bytes_of(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(_mapped(value, _packed, {}), out)
    return out.getvalue()


def _wrong_keys(value: Any) -> str:
    """Each key of a dict whose value cannot be pickled, with the reason."""
    wrong = []
    for key, item in value.items() if isinstance(value, dict) else ():
        try:
            _bytes_of(item)
        except Exception as error:
            wrong.append(f"{key!r:.80}: {error}")
    return "; ".join(wrong)


def unpickled(data: bytes, what: str, trusted: bool) -> Any:
    """IoError that says `what` where it is damaged, or holds objects and is not `trusted`."""
    try:
        value = _loaded(data, trusted)
    except Exception as error:
        named = re.search(r"GLOBAL (\S+) was not", str(error))
        if trusted or not isinstance(error, pickle.UnpicklingError):
            raise IoError(f"[checkpoint] {what} cannot be read: {type(error).__name__}: {error}") from (
                error if trusted else None  # only then code of objects has run
            )
        of = f"an object of '{named[1]}'" if named else f"objects ({error})"
        raise IoError(
            f"[checkpoint] {what} holds {of}, which is no plain data, and nothing was run. {TRUST}; or name the types "
            "with torch.serialization.add_safe_globals"
        ) from None
    return _mapped(value, _unpacked, {})


# Of files that C++ writes: its lists and dicts of one type, and storages of dtypes for which Python has no class.
_OF_CPP = [
    _pickle.restore_type_tag,
    *(getattr(_pickle, f"build_{kind}list") for kind in ("int", "double", "bool", "tensor")),
] + [
    (type(f"{name}Storage", (), {"dtype": getattr(torch, name.lower())}), f"torch.{name}Storage")
    for name in (
        "UInt16", "UInt32", "UInt64", "Float8_e4m3fn", "Float8_e4m3fnuz", "Float8_e5m2", "Float8_e5m2fnuz",
        "Float8_e8m0fnu",
    )
]  # fmt: skip


def _loaded(data: bytes, trusted: bool) -> Any:
    try:
        with torch.serialization.safe_globals(_OF_CPP):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        if not trusted:
            raise
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def cut_of(begin: int, end: int, shape: Sequence[int], place: int = 0, of: int = 1) -> list[Any]:
    """Elements [begin, end) in a tensor of this shape, of slice `place` of `of`."""
    return [begin, end, list(shape), place, of]


def _mapped(value: Any, leaf: Callable[[Any], Any], seen: dict[int, Any]) -> Any:
    """Applies leaf() to all in dicts, lists and tuples, and to these themselves; what has not changed is the same
    object, and what is shared stays so."""
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = value  # for objects that hold themselves
    result = leaf(value)
    if result is value and type(value) in (dict, OrderedDict):
        items = [(leaf(key), _mapped(item, leaf, seen)) for key, item in value.items()]
        if any(a is not c or b is not d for (a, b), (c, d) in zip(items, value.items(), strict=True)):
            result = type(value)(items)
    elif result is value and type(value) in (list, tuple):
        parts = [_mapped(item, leaf, seen) for item in value]
        if any(a is not b for a, b in zip(parts, value, strict=True)):
            result = type(value)(parts)
    seen[id(value)] = result
    return result


def number_of_numpy(value: Any) -> Any:
    """Python's in its place; all else as it is."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        plain = value.item()
        return plain if type(plain) in _PLAIN else value
    return value


def _packed(value: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if type(value) is io.BytesIO:
        return {_STREAM: (value.getvalue(), value.tell())}
    if numpy is not None and type(value) is numpy.ndarray:
        try:
            return {_ARRAY: torch.from_numpy(numpy.array(value, order="C"))}
        except (TypeError, ValueError):  # dtypes that torch lacks
            return value
    return number_of_numpy(value)


def _unpacked(value: Any) -> Any:
    if type(value) is not dict or len(value) != 1:
        return value
    ((key, held),) = value.items()
    if key == _ARRAY and isinstance(held, torch.Tensor):
        try:
            return held.numpy()
        except RuntimeError:
            raise IoError("[checkpoint] an array of NumPy was saved, and numpy is not installed here") from None
    if key == _STREAM and isinstance(held, tuple):
        stream = io.BytesIO(held[0])
        stream.seek(held[1])
        return stream
    return value


class Saved:
    """The blobs of a checkpoint, each read when it is asked for."""

    def __init__(self, reader: _core.CheckpointReader, trusted: bool) -> None:
        self.reader, self._trusted = reader, trusted
        self.names = set(reader.blobs())
        self.run: dict[str, Any] = {}
        self.run = self.blob("python", {})

    def blob(self, name: str, default: Any = None, kind: type = dict) -> Any:
        """IoError where it is none of this kind."""
        if name not in self.names:
            return default
        return of_kind(unpickled(self.reader.blob(name), f"'{name}'", self._trusted), kind, f"'{name}'")

    def has(self, name: str) -> bool:
        return name in self.run or name in self.names

    def part(self, name: str, default: Any = None, kind: type = dict) -> Any:
        """Returns a blob of this name; in older checkpoints a part of "python"."""
        if name in self.run:
            return of_kind(self.run[name], kind, f"'{name}'")
        return self.blob(name, default, kind)

    def optimizers(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns what ranks have saved of each parameter's states, with the blob's name."""
        found = []
        for blob in sorted(self.names):
            if blob.startswith("optimizer-"):
                states = self.blob(blob)
                for name, state in states.items():
                    of_kind(state, dict, f"'{blob}', '{name}'")
                    _check_cut(state.get(CUT), f"'{blob}', '{name}'")
                found.append((blob, states))
        return found

    def param_groups(self) -> list[dict[str, Any]] | None:
        groups: list[dict[str, Any]] | None = self.part("param_groups", kind=list)
        return groups and [of_kind(group, dict, "'param_groups'") for group in groups]

    def group_names(self) -> list[list[str]] | None:
        groups: list[list[str]] | None = self.run.get("group_names")
        if groups is not None:
            for group in of_kind(groups, list, "'python', 'group_names'"):
                for name in of_kind(group, list, "'python', 'group_names'"):
                    of_kind(name, str, "'python', 'group_names'")
        return groups


def of_kind(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise IoError(f"[checkpoint] {what} is damaged: a {type(value).__name__} in the place of a {kind.__name__}")
    return value


def count_of(value: Any, what: str) -> int:
    """A number that counts something, of a file."""
    if type(value) is not int or not 0 <= value <= LARGEST_COUNT:
        raise IoError(f"[checkpoint] {what} is damaged: {value!r:.40} is no number that can be")
    return value


def check_like(value: Any, present: Any, what: str, finite: bool = False) -> None:
    """IoError where `value`, of a file, cannot take the place of `present`: another kind, a count beyond its bounds,
    with `finite` a number that is none. What cannot be known (None here, objects) passes."""
    if isinstance(present, str):
        of_kind(value, str, what)
    elif isinstance(present, bool):
        if value is not None and not (isinstance(value, int) and value in (0, 1)):  # None: torch chooses
            raise _misfit(value, present, what)
    elif _is_number(present):
        if not _is_number(value) or _is_beyond(value) or (finite and not math.isfinite(value)):
            raise _misfit(value, present, what)
    elif isinstance(present, dict):
        for key in of_kind(value, dict, what).keys() & present.keys():
            check_like(value[key], present[key], f"{what}, {key!r}", finite)
    elif isinstance(present, (list, tuple)):
        if not isinstance(value, (list, tuple)) or (isinstance(present, tuple) and len(value) != len(present)):
            raise _misfit(value, present, what)
        same = len(value) == len(present)  # else lists by param group, of other groups
        for place, one in enumerate(value if same or all(map(_is_number, present)) else ()):
            if present:
                check_like(one, present[place if same else 0], what, finite)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _is_beyond(value: Any) -> bool:
    return isinstance(value, int) and abs(value) > LARGEST_COUNT


def _misfit(value: Any, present: Any, what: str) -> IoError:
    return IoError(f"[checkpoint] {what} is damaged: {value!r:.40} in the place of a {type(present).__name__}")


def check_taken(what: str, taker: Any, take: Callable[[Any], Any], value: Any, held: Any) -> None:
    """IoError where `take`, of the object `taker`, raises at `value`. The object is as before: it takes `held`."""
    kept = dict(getattr(taker, "__dict__", {}))
    try:
        take(value)
    except Exception as error:  # any kind of error that objects of a client have
        raise IoError(
            f"[checkpoint] {what} is damaged, or of another object than a {type(taker).__name__}, which does not take "
            f"it: {type(error).__name__}: {error}"
        ) from error
    finally:
        with contextlib.suppress(Exception):
            take(held)
        if kept:
            vars(taker).clear()
            vars(taker).update(kept)


def _check_cut(cut: Any, what: str) -> None:
    if cut is not None:
        parts = of_kind(cut, list, what)
        if len(parts) != 5:
            raise IoError(f"[checkpoint] {what} is damaged: {len(parts)} numbers say what of the parameter it is of")
        for number in (*parts[:2], *of_kind(parts[2], list, what), *parts[3:]):
            count_of(number, what)
