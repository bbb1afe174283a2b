"""Partitioned parameters (stage 3) and the modules that use them: hooks that announce to the core which module runs."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from tessera import _core
from tessera._loans import Loans, StandIn
from tessera._outputs import may_hold_tensors, tensors_in
from tessera.errors import UsageError
from tessera.zero._owners import Home, home_of, hooks_of, set_home

_SCOPE = "_tessera_scope"  # on modules: the core's number
_EXTERNAL = "_tessera_external"  # on modules: parameters of others that their forward reads


def register_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Says that `module`, which does not own `parameter`, uses it in its forward: it is gathered there too. Before or
    after tessera.initialize. A parameter that is read as an attribute in a forward registers itself."""
    if not isinstance(parameter, nn.Parameter):
        raise UsageError(f"[zero] register_external_parameter takes a Parameter, got {type(parameter).__name__}")
    known = module.__dict__.setdefault(_EXTERNAL, [])
    if not any(parameter is other for other in known):
        known.append(parameter)
    _use_in(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Undoes register_external_parameter for engines built from now on."""
    known = module.__dict__.get(_EXTERNAL, [])
    kept = [other for other in known if other is not parameter]
    if not isinstance(parameter, nn.Parameter) or len(kept) == len(known):
        raise UsageError("[zero] unregister_external_parameter: the parameter is not registered for this module")
    module.__dict__[_EXTERNAL] = kept


def _use_in(module: nn.Module, param: torch.Tensor) -> None:
    """Gathers `param`, when an engine partitions it, with `module` too, from now on."""
    home = home_of(param)
    partition = hooks_of(param)
    if home is None or partition is None:
        return
    scope = module.__dict__.get(_SCOPE)
    if scope is None:  # the module has no parameters of its own
        scope = home[0].add_module([home[1]])
        partition.hook(module, scope)
        if home[0].inside_module():
            partition.hooked_late.add(scope)
    else:
        home[0].register_external(scope, home[1])
    # The module's first call may be under way, which no hook has seen begin: the one around it has the parameter, too.
    if scope in partition.hooked_late and home[0].inside_module():
        home[0].use_elsewhere(home[1])


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
        """Ends calls that are `depth` deep or deeper, for the core too."""
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
        # For calls under way: whether the core wants their tensors; None: the core does not know of the call.
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
        self.core.leave_module(self.number, outputs, outer and not outputs and _hides(output))
        for tensor in outputs:  # a parameter handed to the parent
            if isinstance(tensor, nn.Parameter):
                _read_elsewhere(tensor)

    def forget(self) -> bool:
        """Ends the innermost call. True where the core knows of it."""
        if self.outer.pop() is None:
            return False
        for params in self.owned:
            params.running -= 1
        return True


def _hides(output: Any) -> bool:
    """Whether what the backward goes through may lie in an output in which no tensor is seen, or in what the forward
    left elsewhere. None is also the output of a forward that raised."""
    return may_hold_tensors(output) or (output is None and sys.exc_info()[0] is None)


class Partition:
    """Installs the hooks of `engine`, whose core is `core`, by its `loans`. `covers`: paths of modules whose parameters
    are all gathered at once (units and leaf modules); `leaves`: paths of modules below which nothing is hooked."""

    def __init__(
        self,
        engine: object,
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
        self.hooked_late: set[int] = set()  # numbers of modules that were hooked in the present one
        self._set_homes(model, index, None)
        covered, leaf_paths = set(covers), tuple(leaves)
        scopes: dict[str, _Scope] = {}  # of modules that cover others
        for path, module in model.named_modules():
            if any(path != leaf and path.startswith(f"{leaf}.") for leaf in leaf_paths):
                continue
            whole = path in covered or path in leaf_paths
            used = [*module.parameters(recurse=whole), *module.__dict__.get(_EXTERNAL, [])]
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

    def take(self, param: torch.Tensor, number: int) -> None:
        """A parameter that came later is the engine's, with this number in its core; not partitioned."""
        set_home(param, Home(self._core, number, self._engine()), self._loans)

    def hook(self, module: nn.Module, number: int, leaf: bool = False, cover: _Scope | None = None) -> _Scope:
        """Tells the core when `module` runs, as its module `number`."""
        owned = [self._wrap(part) for part in (module.modules() if leaf else [module]) if part._parameters]
        scope = _Scope(self._core, self._calls, number, owned, cover)
        self._loans.put(module, _SCOPE, number)
        self._loans.keep_off_copies(module)
        self._loans.hook(module.register_forward_pre_hook(scope.before, prepend=True, with_kwargs=True))
        self._loans.hook(module.register_forward_hook(scope.after, always_call=True))
        return scope

    def hide_from_compiler(self, model: nn.Module) -> None:
        """Makes torch.compile leave the hooks that call the core to Python: a break in the graph at each unit, where it
        would take them apart, and give up after some. Hooks inside a unit do nothing while it runs."""
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key, hook in hooks.items():
                    scope = getattr(hook, "__self__", None)
                    if isinstance(scope, _Scope) and scope.cover is None:
                        hooks[key] = torch.compiler.disable(hook)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Surrounds a forward of the engine: module calls that the forward interrupts end with it, and those that an
        earlier one left outside of it end before."""
        self.end_stray()
        if self._forwards == 0:
            self.hooked_late.clear()
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
