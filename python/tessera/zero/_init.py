"""zero.Init: models whose parameters are partitioned while they are built.

Note [Building a partitioned model]
  Inside the context every module class's __init__ is wrapped: when the outermost __init__ of a module returns, what it
  registered is broadcast from rank 0, cast and partitioned (_core.EarlyParams). Code that still initializes a module
  afterwards (the parent's __init__, apply(), loops over parameters) reads parameters through the module's _parameters,
  which is a dict that gathers what is read; those few are partitioned again when others are read or the context ends,
  with what rank 0 wrote. The modules own the early parameters, so a model that is dropped frees its shards;
  tessera.initialize takes them over unit by unit.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tessera import _core, distributed
from tessera._config import ConfigLike, load_config
from tessera._device import checked_device, group_device, move
from tessera._former import of_zero_init, takes_former
from tessera._mesh import Ranks, core_mesh, mesh_sizes
from tessera.errors import ConfigError
from tessera.zero._owners import Home, holder_of, set_home

_EARLY = "_tessera_early"  # on modules: the EarlyParameters that hold what the module owns


class EarlyParameters:
    """The partitioned parameters of one construction; what GatheredParameters asks before there is an engine."""

    OPEN_ELEMENTS = 1 << 21  # elements that code which reads parameters while a model is built keeps whole at most

    def __init__(self, mesh: _core.Mesh, device: torch.device | None, *home: Any) -> None:
        """`device`: where parameters of the CPU are moved to before they are partitioned, if anywhere. `home`: where
        slices live, as _core.EarlyParams takes it."""
        self.core = _core.EarlyParams(mesh, *home)
        self._device = device
        self._read: dict[int, int] = {}  # open because they were read: number -> elements, oldest first

    def __deepcopy__(self, memo: Any) -> EarlyParameters:
        return self  # a copied module's parameters are whole; its owner here serves, too

    def add(self, name: str, param: nn.Parameter, dtype: torch.dtype) -> None:
        if self._device is not None and param.device.type == "cpu":
            move(param, self._device)
        set_home(param, Home(self, self.core.add(name, param, dtype)))

    def read(self, number: int, elements: int) -> None:
        """Collective, unless the parameter is whole."""
        if self.core.is_gathered(number):
            return
        self.core.gather([number], _core.Writes.FromRank, 0)
        self._read[number] = elements
        while len(self._read) > 1 and sum(self._read.values()) > self.OPEN_ELEMENTS:
            self._close([next(iter(self._read))])

    def settle(self) -> None:
        """Ends what read() began. Collective."""
        self._close(list(self._read))

    def _close(self, numbers: list[int]) -> None:
        for number in numbers:
            del self._read[number]
        self.core.release(numbers, _core.Writes.FromRank, 0)

    def gather(self, numbers: list[int], writes: _core.Writes, writer: int) -> None:
        self._close([number for number in numbers if number in self._read])
        self.core.gather(numbers, writes, writer)

    def release(self, numbers: list[int], writes: _core.Writes, writer: int) -> None:
        self.core.release(numbers, writes, writer)

    def is_gathered(self, number: int) -> bool:
        return self.core.is_gathered(number)

    def partition_of(self, number: int) -> _core.ParamPartition:
        return self.core.partition_of(number)

    def held_values(self, number: int) -> torch.Tensor:
        return self.core.held_values(number)

    def destroyed(self) -> bool:
        return False

    def inside_module(self) -> bool:
        return False


class _Watched(dict[str, Any]):
    """A module's _parameters while a model is built, see Note [Building a partitioned model]."""

    def __getitem__(self, name: str) -> Any:
        return _whole(super().__getitem__(name))

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        for name, param in super().items():
            yield name, _whole(param)

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        for param in super().values():
            yield _whole(param)


def _whole(param: Any) -> Any:
    holder = None if param is None else holder_of(param)
    if holder is not None and isinstance(holder[0], EarlyParameters):
        holder[0].read(holder[1], torch.Tensor.numel(param))  # a class of parameters may show another number
    return param


def early_of(param: torch.Tensor) -> tuple[_core.EarlyParams | None, int]:
    """The early holder of `param`, when it was partitioned before there was an engine, and its number there, for a
    ParamSpec."""
    holder = holder_of(param)
    if holder is None or not isinstance(holder[0], EarlyParameters):
        return None, -1
    return holder[0].core, holder[1]


def taken_over(model: nn.Module) -> None:
    """An engine holds the parameters of `model` now."""
    for module in model.modules():
        module.__dict__.pop(_EARLY, None)


def whole_for_good(param: nn.Parameter) -> None:
    """Ends what zero.Init did to `param`: it is whole, with rank 0's values. Collective."""
    early, number = early_of(param)
    if early is not None:
        early.restore(number)


def partition_again(mesh: _core.Mesh) -> Callable[[nn.Module, str, nn.Parameter], None]:
    """A function that partitions parameters which were made whole, and changed since, over the ranks of `mesh` that
    hold the same. Others are left alone. Collective."""
    same = _core.Mesh()
    for axes in ([_core.Axis.DpReplicate], [_core.Axis.DpShard], [_core.Axis.Sp], [_core.Axis.DpShard, _core.Axis.Sp]):
        same.set(axes, mesh.group(axes))
    holder = EarlyParameters(same, None)

    def partition(module: nn.Module, name: str, param: nn.Parameter) -> None:
        if early_of(param)[0] is not None:
            holder.add(f"{type(module).__name__}.{name}", param, param.dtype)
            module.__dict__[_EARLY] = holder

    return partition


_active: ContextVar[Init | None] = ContextVar("tessera_active_init", default=None)


@contextmanager
def suspended() -> Iterator[None]:
    """Modules that are built inside are left alone."""
    active = _active.get()
    if active is not None:
        active.settle()
    token = _active.set(None)
    try:
        yield
    finally:
        _active.reset(token)


class Init:
    """Inside the `with`, models are built with partitioned parameters: each rank keeps 1/N of what is built, and only
    the module under construction is whole. `module`: partitions the parameters of a module that exists already.

    Rank 0's values hold. dtype: `dtype`, else that of the configuration's precision (bf16, fp16 or fp32), else fp16;
    parameters that are not floating point, buffers, and parameters on the meta device are left alone (the latter until
    they get values inside the context, as with torch.nn.utils.skip_init). Parameters are read and written inside
    GatheredParameters, also before there is an engine; while the model is built, reading them as attributes or from
    named_parameters() is enough, and what rank 0 writes holds. A context inside another one does nothing;
    tessera.initialize may be called inside. Where the process group has a back end of an accelerator's own, as NCCL,
    the parameters are there, and so is what torch's factory functions make inside, unless `tensor_overrides` is False.
    Collective: all ranks build the same modules in the same order. With one rank parameters are only cast.
    `group`: the ranks that share the parameters (a torch ProcessGroup or a group of tessera; default: all processes).
    `remote_device`: where each rank's part lives, "cpu" (with `pin_memory` page-locked), or "nvme" in the nvme_path of
    the configuration's offload_param; the default is that offload_param's device. With either one rank
    partitions too.
    ConfigError for arguments that make no sense, NotImplementedError for what is not served, RuntimeError when
    the environment says that there are more ranks than the process group has.
    """

    @takes_former(of_zero_init)
    def __init__(
        self,
        module: nn.Module | None = None,
        config: ConfigLike | None = None,
        *,
        dtype: torch.dtype | None = None,
        group: Ranks | None = None,
        remote_device: str | None = None,
        pin_memory: bool = False,
        tensor_overrides: bool = True,
        enabled: bool = True,
    ) -> None:
        self._enabled = enabled
        if not enabled:
            return
        loaded = None if config is None else load_config(config)
        self._dtype = _dtype(dtype, loaded)
        if group is None:
            distributed.prepare()
        device = checked_device(group)
        self._early = EarlyParameters(_mesh(group, loaded), device, *_home(remote_device, pin_memory, loaded))
        self._factories = torch.device(device) if tensor_overrides and device is not None else nullcontext()
        self._building: set[int] = set()  # ids of modules whose __init__ runs
        self._built: list[weakref.ref[nn.Module]] = []
        self._token: Any = None
        if module is not None:
            for part in module.modules():
                self._partition(part)

    def __enter__(self) -> Init:
        if self._enabled and _active.get() is None:
            self._token = _active.set(self)
            _constructors.enter()
            self._factories.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._enabled or self._token is None:
            return
        _active.reset(self._token)
        self._token = None
        self._factories.__exit__(None, None, None)
        _constructors.exit()
        modules = [module for reference in self._built if (module := reference()) is not None]
        self._built.clear()
        try:
            if error is None:
                for module in modules:
                    self._partition(module)
                self.settle()
        finally:
            for module in modules:
                for part in module.modules():
                    if isinstance(part._parameters, _Watched):
                        part.__dict__["_parameters"] = dict(dict.items(part._parameters))
            self._early.core.prune()

    def settle(self) -> None:
        """Parameters that construction code has read are partitioned again. Collective."""
        self._early.settle()

    def build(
        self, module: nn.Module, init: Callable[..., None], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Runs one `init` of the chain of `module`."""
        if id(module) in self._building:
            init(module, *args, **kwargs)
            return
        self._building.add(id(module))
        try:
            init(module, *args, **kwargs)
        finally:
            self._building.discard(id(module))
        if "_parameters" not in module.__dict__:
            return  # no nn.Module.__init__: the class is not one in earnest
        module.__dict__["_parameters"] = _Watched(module._parameters)
        self._built.append(weakref.ref(module))
        for part in module.modules():  # copies and materialized modules too, which ran no __init__ of their own here
            if isinstance(part._parameters, _Watched) and id(part) not in self._building:
                self._partition(part)

    def _partition(self, module: nn.Module) -> None:
        for name, param in dict.items(module._parameters):
            if param is None or holder_of(param) is not None or is_lazy(param):
                continue
            if param.is_meta or not param.is_floating_point():
                continue
            self._early.add(f"{type(module).__name__}.{name}", param, self._dtype)
            module.__dict__[_EARLY] = self._early


def _dtype(dtype: torch.dtype | None, config: _core.Config | None) -> torch.dtype:
    if dtype is not None:
        if not dtype.is_floating_point:
            raise ConfigError(f"[zero.Init] dtype must be a floating-point dtype, got {dtype}")
        return dtype
    return torch.float16 if config is None else _core.precision(config).param


def _home(remote_device: Any, pin_memory: bool, config: _core.Config | None) -> tuple[_core.Residence, str, bool]:
    device, folder = str(getattr(remote_device, "value", remote_device) or "none"), ""
    if config is not None:
        zero = config.zero_optimization
        if zero.offload_param.device != "none":
            device, pin_memory = zero.offload_param.device, zero.offload_param.pin_memory
        folder = zero.offload_param.nvme_path or zero.offload_optimizer.nvme_path or ""
    homes = {"none": _core.Residence.Device, "cpu": _core.Residence.Host, "nvme": _core.Residence.Nvme}
    if device not in homes:
        raise ConfigError(f"[zero.Init] remote_device must be one of {list(homes)}, got '{device}'")
    if device == "nvme" and not folder:
        raise ConfigError(
            "[zero.Init] remote_device 'nvme' needs zero_optimization.offload_param.nvme_path in the configuration"
        )
    return homes[device], folder, pin_memory


def _mesh(group: Any, config: _core.Config | None) -> _core.Mesh:
    # The ranks of all slices of the model are included: what is to be cut is whole as yet.
    sizes = {} if config is None else {**mesh_sizes(config), "tp": 1}
    mesh, _ = core_mesh(group, **sizes, device=group_device(group))
    expected = distributed.launched(rendezvous=False).size if group is None and mesh.batch_size() == 1 else 1
    if expected > 1:
        raise RuntimeError(
            f"[zero.Init] the process group has 1 rank, but {expected} were started: call init_distributed() (or "
            "torch.distributed.init_process_group) with all ranks first, or pass the group"
        )
    return mesh


class _Constructors:
    """The wrapped __init__ of all module classes, while any thread is inside an Init."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._originals: dict[type, Callable[..., None]] = {}

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._wrap_tree(nn.Module)
                nn.Module.__init_subclass__ = classmethod(_init_subclass)  # type: ignore[assignment]

    def exit(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                del nn.Module.__init_subclass__
                for cls, init in self._originals.items():
                    cls.__init__ = init  # type: ignore[misc]
                self._originals.clear()

    def _wrap_tree(self, root: type) -> None:
        cls: type
        for cls in root.__subclasses__():
            self.wrap(cls)
            self._wrap_tree(cls)

    def wrap(self, cls: type) -> None:
        init = cls.__dict__.get("__init__")
        if init is None or cls in self._originals or isinstance(cls, torch.jit._script.ScriptMeta):
            return
        self._originals[cls] = init

        @functools.wraps(init)
        def build(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            active = _active.get()
            if active is None:
                init(module, *args, **kwargs)
            else:
                active.build(module, init, args, kwargs)

        cls.__init__ = build  # type: ignore[misc]


_constructors = _Constructors()


def _init_subclass(cls: type[nn.Module], /, **kwargs: Any) -> None:
    super(nn.Module, cls).__init_subclass__(**kwargs)
    _constructors.wrap(cls)
