"""Partitioned parameters (stage 3) and the modules that use them: hooks that tell the core which module runs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from tessera import _core
from tessera._loans import Loans, StandIn
from tessera._outputs import tensors_in

_HOME = "_tessera_home"  # of parameters: Home
_SCOPE = "_tessera_scope"  # of modules: the core's number
EXTERNAL = "_tessera_external"  # of modules: parameters of others that their forward reads


class Holder(Protocol):
    """Who holds partitioned parameters: an engine's core, or EarlyParameters before there is one."""

    def gather(self, numbers: list[int], writable: bool, /) -> None: ...
    def release(self, numbers: list[int], writes: _core.Writes, writer: int, /) -> None: ...
    def is_gathered(self, number: int, /) -> bool: ...
    def partition_of(self, number: int, /) -> _core.ParamPartition: ...
    def destroyed(self) -> bool: ...
    def inside_module(self) -> bool: ...


class Home:
    """Where a parameter lives: its holder, its number there, with an engine that engine, and, where it partitions, the
    hooks around it."""

    __slots__ = ("engine", "holder", "number", "partition")

    def __reduce__(self) -> Any:
        return type(None), ()  # a pickled parameter lives nowhere

    def __init__(self, holder: Holder, number: int, engine: Any = None, partition: Partition | None = None) -> None:
        self.holder = weakref.ref(holder)
        self.number = number
        self.engine = None if engine is None else weakref.ref(engine)
        self.partition = None if partition is None else weakref.ref(partition)


def set_home(param: torch.Tensor, home: Home, loans: Loans | None = None) -> None:
    """`loans`: takes it off again, and what was there before."""
    if loans is None:
        setattr(param, _HOME, home)
    else:
        vars(param).pop(_HOME, None)
        loans.put(param, _HOME, home)


def holder_of(param: torch.Tensor) -> tuple[Holder, int] | None:
    """Who holds `param` now, and the parameter's number there."""
    home: Home | None = getattr(param, _HOME, None)
    holder = None if home is None else home.holder()
    return None if home is None or holder is None or holder.destroyed() else (holder, home.number)


def engine_of(param: torch.Tensor) -> Any:
    """The live engine of the front end that holds `param`, in any stage; None without one."""
    home: Home | None = getattr(param, _HOME, None)
    if home is None or home.engine is None or holder_of(param) is None:
        return None
    return home.engine()


def home_of(param: torch.Tensor) -> tuple[_core.Engine, int] | None:
    """The live core that partitions parameters, `param` among them, and the parameter's number there."""
    found = holder_of(param)
    if found is None or not isinstance(found[0], _core.Engine) or getattr(param, _HOME).partition is None:
        return None
    return found[0], found[1]


def use_in(module: nn.Module, param: torch.Tensor) -> None:
    """From now on `param`, when an engine partitions it, is gathered with `module` too."""
    home = home_of(param)
    reference = getattr(param, _HOME).partition if home is not None else None
    partition = None if reference is None else reference()
    if home is None or partition is None:
        return
    scope = module.__dict__.get(_SCOPE)
    if scope is None:  # a module without parameters of its own
        partition.hook(module, home[0].add_module([home[1]]))
    else:
        home[0].register_external(scope, home[1])


class _Parameters(StandIn):
    """A module's _parameters. A partitioned parameter that is read while its module does not run (a tied weight, a
    bias used by the parent) is gathered with the module that runs, from then on."""

    running = 0
    cover: _Scope | None = None

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if self.running or (self.cover is not None and self.cover.outer):
            return param
        if param is not None and not torch.compiler.is_dynamo_compiling():
            _read_elsewhere(param)
        return param


def _read_elsewhere(param: torch.Tensor) -> None:
    home = home_of(param)
    if home is not None:
        core, number = home
        if core.inside_module() and not core.is_gathered(number):
            core.use_elsewhere(number)


class _Calls(list["_Scope"]):
    """The calls of hooked modules that are under way, the innermost last. Torch runs no hooks for a call that ends with
    a BaseException that is no Exception (KeyboardInterrupt): such a call stays here until one around it ends."""

    def end(self, scope: _Scope) -> None:
        """The innermost call of `scope` is over, and so are those inside it."""
        while (inner := self.pop()) is not scope:
            inner.forget()

    def end_all(self, core: _core.Engine, depth: int = 0) -> None:
        """Those that are `depth` calls deep or deeper are over, for the core too."""
        while len(self) > depth:
            scope = self.pop()
            if scope.forget() and not core.destroyed():
                with contextlib.suppress(RuntimeError):  # the core ends the call before it complains of one
                    core.leave_module(scope.number, [])


class _Scope:
    """The hooks of one module. `cover`: the nearest module around it that gathers all below it. While that runs
    there is nothing to do, and nothing is done: a call into the core would cost more than many a small module."""

    def __init__(
        self, core: _core.Engine, calls: _Calls, number: int, owned: list[_Parameters], cover: _Scope | None
    ) -> None:
        self.core = core
        self.calls = calls
        self.cover = cover
        self.number = number
        self.owned = owned
        # Of calls under way: whether the core wants their tensors; None: it does not know of the call.
        self.outer: list[bool | None] = []
        for params in owned:
            params.cover = cover

    def before(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.cover is not None:
            if torch.compiler.is_dynamo_compiling():
                return
            if self.cover.outer:
                self.outer.append(None)
                self.calls.append(self)
                return
        outer = self.core.enter_module(self.number)
        self.outer.append(outer)
        self.calls.append(self)
        for params in self.owned:
            params.running += 1
        if outer and torch.is_grad_enabled():
            self.core.note_inputs(tensors_in((args, kwargs)) if kwargs else tensors_in(args))

    def after(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self.cover is not None and torch.compiler.is_dynamo_compiling():
            return
        if not self.outer:  # gathering failed
            return
        if self.calls[-1] is self:
            self.calls.pop()
        else:
            self.calls.end(self)
        outer = self.outer.pop()
        if outer is None:
            return
        for params in self.owned:
            params.running -= 1
        if self.core.destroyed():
            return
        outputs = tensors_in(output) if outer else []
        self.core.leave_module(self.number, outputs)
        for tensor in outputs:  # a parameter handed to the parent
            if isinstance(tensor, nn.Parameter):
                _read_elsewhere(tensor)

    def forget(self) -> bool:
        """The innermost call is over. True where the core knows of it."""
        if self.outer.pop() is None:
            return False
        for params in self.owned:
            params.running -= 1
        return True


class Partition:
    """Installs the hooks of `engine`, whose core is `core`, by its `loans`. `covers`: paths of modules whose parameters
    are all gathered at once (units and leaf modules); `leaves`: paths of modules below which nothing is hooked."""

    def __init__(
        self,
        engine: Any,
        core: _core.Engine,
        loans: Loans,
        model: nn.Module,
        index: dict[int, int],
        covers: Iterable[str],
        leaves: Iterable[str],
    ) -> None:
        self._engine = weakref.ref(engine)
        self._core = core
        self._loans = loans
        self._calls = _Calls()
        self._forwards = 0  # of the engine, under way
        self._set_homes(model, index, None)
        covered, leaf_paths = set(covers), tuple(leaves)
        scopes: dict[str, _Scope] = {}  # of modules that cover others
        for path, module in model.named_modules():
            if any(path != leaf and path.startswith(f"{leaf}.") for leaf in leaf_paths):
                continue
            whole = path in covered or path in leaf_paths
            used = [*module.parameters(recurse=whole), *module.__dict__.get(EXTERNAL, [])]
            numbers = [index[id(p)] for p in used if id(p) in index]
            if not numbers and module is not model:
                continue
            number = core.add_module(numbers)
            if number < 0:
                return  # nothing is partitioned
            scope = self.hook(module, number, path in leaf_paths, _nearest(scopes, path))
            if path in covered:
                scopes[path] = scope
        self._set_homes(model, index, self)

    def _set_homes(self, model: nn.Module, index: dict[int, int], partition: Partition | None) -> None:
        for param in model.parameters():
            if id(param) in index:
                set_home(param, Home(self._core, index[id(param)], self._engine(), partition), self._loans)

    def hook(self, module: nn.Module, number: int, leaf: bool = False, cover: _Scope | None = None) -> _Scope:
        """Tells the core when `module` runs, as its module `number`."""
        owned = [self._wrap(part) for part in (module.modules() if leaf else [module]) if part._parameters]
        scope = _Scope(self._core, self._calls, number, owned, cover)
        self._loans.put(module, _SCOPE, number)
        self._loans.keep_off_copies(module)
        self._loans.hook(module.register_forward_pre_hook(scope.before, prepend=True, with_kwargs=True))
        self._loans.hook(module.register_forward_hook(scope.after, always_call=True))
        return scope

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward of the engine: module calls that it interrupts end with it, and those that an earlier one
        outside of it left end before."""
        self.end_stray()
        depth, self._forwards = len(self._calls), self._forwards + 1
        try:
            yield
        except BaseException:
            self._calls.end_all(self._core, depth)
            raise
        finally:
            self._forwards -= 1

    def end_stray(self) -> None:
        """Ends module calls that were interrupted. For a moment when none is under way, but in a forward of the engine
        or in a backward."""
        if self._calls and self._forwards == 0 and torch._C._current_graph_task_id() == -1:
            self._calls.end_all(self._core)

    def _wrap(self, module: nn.Module) -> _Parameters:
        if not isinstance(module._parameters, _Parameters):
            self._loans.put(module, "_parameters", _Parameters(module._parameters))
            self._loans.keep_off_copies(module)
        params = module._parameters
        assert isinstance(params, _Parameters)
        return params


def _nearest(scopes: dict[str, _Scope], path: str) -> _Scope | None:
    while "." in path:
        path = path.rpartition(".")[0]
        if path in scopes:
            return scopes[path]
    return None


def gathered(params: Iterable[torch.Tensor], writable: bool) -> list[tuple[Holder, list[int]]]:
    """Gathers `params`; returns what is to be released: the holders with the numbers of theirs. `writable`: some rank's
    values may hold in the end."""
    numbers: dict[int, tuple[Holder, list[int]]] = {}
    shares: dict[int, bool] = {}  # engines, where it matters
    for param in params:
        found = holder_of(param)
        if found is None:
            continue
        holder, number = found
        if isinstance(holder, _core.Engine) and not home_of(param):
            # Whole on every rank. One rank's values could hold only after writes to memory that all ranks have.
            if id(holder) not in shares:
                shares[id(holder)] = writable and holder.memory().shared > 0
            if not shares[id(holder)]:
                continue
        numbers.setdefault(id(holder), (holder, []))[1].append(number)
    groups = list(numbers.values())
    for number, (holder, wanted) in enumerate(groups):
        try:
            holder.gather(wanted, writable)
        except BaseException:
            release_unread(groups[:number])
            raise
    return groups


def release_unread(groups: list[tuple[Holder, list[int]]]) -> None:
    """Ends what gathered() began, when an error is on its way already."""
    for holder, numbers in groups:
        with contextlib.suppress(RuntimeError):
            holder.release(numbers, _core.Writes.None_, 0)
