"""Names of DeepSpeed's that this package took before. They go on until 0.3.0 (CHANGELOG.md), which is without this
file, each with a FutureWarning that says what took its place; the package `deepspeed` has them for good."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def warn(old: str, new: str, level: int = 2) -> None:
    """`level`: calls from who warns up to the user's."""
    warnings.warn(
        f"{old} is DeepSpeed's name, and goes with 0.3.0; here it is {new}", FutureWarning, stacklevel=level + 1
    )


def takes_former(turn: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]) -> Callable[[F], F]:
    """`turn`: takes the former ones out of the keywords, puts those in that took their place, and returns the
    positional arguments."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*turn(args, kwargs), **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def rename(kwargs: dict[str, Any], where: str, names: Mapping[str, str | None]) -> None:
    """`names`: the former one -> the one of today, None for what nothing reads any more."""
    for old in [name for name in kwargs if name in names]:
        value, new = kwargs.pop(old), names[old]
        warn(f"{where}({old}=...)", f"{new}=" if new else "not read", level=4)
        if new is not None and value is not None:
            if kwargs.get(new) is not None and kwargs[new] is not value:
                raise TypeError(f"{where}: {old} and {new} are two names of one argument; pass {new}")
            kwargs[new] = value


def place(args: tuple[Any, ...], kwargs: dict[str, Any], order: tuple[str, ...], where: str) -> None:
    """Positional arguments in an order of before, as keywords."""
    warn(f"{where} with positional arguments in that order", "keywords", level=4)
    for name, value in zip(order, args, strict=False):
        if value is not None:
            kwargs.setdefault(name, value)


_INITIALIZE = (
    *("args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler", "distributed_port", "mpu"),
    *("dist_init_required", "collate_fn", "config", "mesh_param", "config_params"),
)


def of_initialize(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    where = "tessera.initialize"
    if args and (len(args) > 2 or "model" in kwargs or (len(args) == 2 and "config" in kwargs)):
        place(args, kwargs, _INITIALIZE, where)
        args = ()
    given = kwargs.pop("args", None)
    if given is not None:
        warn(f"{where}(args=...)", "config=", level=3)
        named = given.get if isinstance(given, Mapping) else functools.partial(_attribute, given)
        if (path := named("deepspeed_config")) is not None:
            kwargs["config_params"] = path if kwargs.get("config_params") is None else kwargs["config_params"]
    if kwargs.get("mesh_param") is not None:
        kwargs["mesh_param"] = kwargs["mesh_param"][1]
    if kwargs.get("mpu") is not None and hasattr(kwargs["mpu"], "get_data_parallel_group"):
        raise TypeError(
            f"{where}: an mpu is for deepspeed.initialize; here it is group=, a process group, mesh or groups"
        )
    rename(
        kwargs,
        where,
        {
            "config_params": "config",
            "mesh_param": "sequence_parallel",
            "mpu": "group",
            "dist_init_required": None,
            "distributed_port": None,
        },
    )
    return args


def _attribute(given: Any, name: str) -> Any:
    return getattr(given, name, None)


def of_init_distributed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    where = "tessera.init_distributed"
    rename(
        kwargs,
        where,
        {
            "dist_backend": "backend",
            "auto_mpi_discovery": "other_launchers",
            "distributed_port": "port",
            "verbose": None,
            "config": None,
            "dist_init_required": None,
        },
    )
    return args


def of_zero_init(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    groups = ("data_parallel_group", "zero_param_parallel_group", "sequence_data_parallel_group")
    rename(
        kwargs,
        "tessera.zero.Init",
        {"config_dict_or_path": "config", **dict.fromkeys(groups, "group"), "mem_efficient_linear": None},
    )
    return args


def renamed(where: str, **names: str | None) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]:
    """For takes_former(): keywords only, `names` as of rename()."""

    def turn(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        rename(kwargs, where, names)
        return args

    return turn


def former_names(
    module: str, names: Mapping[str, str], where: Mapping[str, Any], shapes: Mapping[str, Any] | None = None
) -> Callable[[str], Any]:
    """The __getattr__ of a module whose globals are `where`. `shapes`: what was called in another way than what took
    its place."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn(f"{module}.{name}", names[name])
        return shapes[name] if shapes and name in shapes else where[names[name]]

    return get


def former_methods(**names: str) -> Callable[[type], type]:
    """Methods of a class by the names that they had."""

    def decorate(cls: type) -> type:
        for old, new in names.items():
            setattr(cls, old, _method(old, new))
        return cls

    return decorate


def former_attributes(**names: str) -> Callable[[type], type]:
    """Attributes of a class's objects by the names that they had."""

    def decorate(cls: type) -> type:
        for old, new in names.items():
            setattr(cls, old, _attribute_of(f"{cls.__name__}.{old}", new))
        return cls

    return decorate


def _attribute_of(old: str, new: str) -> property:
    def get(self: object) -> object:
        warn(old, new)
        return getattr(self, new)

    def put(self: object, value: object) -> None:
        warn(old, new)
        setattr(self, new, value)

    return property(get, put, doc=f"{new}, by the name that it had before.")


def _method(old: str, new: str) -> Callable[..., Any]:
    def call(self: object, *args: object, **kwargs: object) -> object:
        warn(f"{old}()", f"{new}()")
        return getattr(self, new)(*args, **kwargs)

    call.__doc__ = f"{new}(), by the name that it had before."
    return call
