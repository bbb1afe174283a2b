"""How an Engine shows what its parts do: public methods and properties whose bodies, and docstrings, are a part's."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar, overload

T = TypeVar("T")
P = ParamSpec("P")
Overloaded = TypeVar("Overloaded", bound=Callable[..., Any])


class Shown(Generic[T]):
    """The type that type checkers take property_of() for."""

    @overload
    def __get__(self, engine: None, owner: type) -> property: ...
    @overload
    def __get__(self, engine: object, owner: type | None = None) -> T: ...
    def __get__(self, engine: object, owner: type | None = None) -> Any: ...
    def __set__(self, engine: object, value: NoReturn) -> None: ...


def method_of(part: str, method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """`method` of what the engine has as `part`."""

    def call(engine: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(getattr(engine, part), *args, **kwargs)

    return functools.update_wrapper(call, method)


def overloaded_of(part: str, method: Overloaded) -> Overloaded:
    """method_of() of a method whose overloads, of any `self`, type checkers shall see."""
    return method_of(part, method)  # type: ignore[return-value]


def property_of(part: str, getter: Callable[[Any], T]) -> Shown[T]:
    """The property `getter` of what the engine has as `part`, read-only."""
    shown: property = getter  # type: ignore[assignment]  # so it is, at run time
    assert shown.fget is not None
    made = property(operator.attrgetter(f"{part}.{shown.fget.__name__}"))
    made.__doc__ = shown.__doc__
    return made  # type: ignore[return-value]


def weak(owner: T) -> T:
    """`owner` as its own parts hold it, which ends with its last user. Not for code that runs when it ends."""
    proxy: Any = weakref.proxy(owner)
    return proxy
