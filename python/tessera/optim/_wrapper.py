"""tessera.Optimizer: what training code sees of an optimizer whose states the engine keeps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, overload

import torch
from torch.utils.hooks import RemovableHandle

from tessera._loans import loss_of
from tessera.errors import UsageError
from tessera.loss_scale import LossScaler
from tessera.optim._runners import Runner

T = TypeVar("T")
# Hooks as torch types them: the optimizer, arguments of step(), a state.
BeforeStep = Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]
AfterStep = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
OfState = Callable[[Any], None]
WithState = Callable[[Any, dict[str, Any]], dict[str, Any] | None]


class Owner(Protocol):
    """The part of an engine that the wrapper needs."""

    @property
    def loss_scaler(self) -> LossScaler: ...
    def step(self) -> None: ...
    def zero_grad(self) -> None: ...
    def add_param_group(self, group: dict[str, Any], /) -> None: ...
    def masters(self) -> dict[str, torch.Tensor]: ...
    def load_masters(self, masters: dict[str, torch.Tensor], /) -> None: ...


class Optimizer(torch.optim.Optimizer):
    """A torch optimizer over sharded or mixed-precision states. `optimizer` is the one it stands for: they share
    param_groups, so changed learning rates act in the next step. state_dict() holds this rank's part."""

    def __init__(self, engine: Owner, runner: Runner) -> None:
        # torch's own __init__ would make new groups and states; both belong to the base.
        self.optimizer = runner.base
        self._engine = weakref.ref(engine)
        self.overflow = False
        self._opt_called = False

    def _live_engine(self) -> Owner:
        engine = self._engine()
        if engine is None:
            raise UsageError("[Optimizer] its engine is gone; keep the engine that tessera.initialize returned")
        return engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the optimizer behind it: what is written to them counts."""
        return self.optimizer.param_groups

    @property
    def state(self) -> dict[torch.Tensor, Any]:  # type: ignore[override]
        """The state of the optimizer behind it; what ranks share is in parts there (tessera.state)."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Hyper-parameters of groups that do not say their own."""
        return self.optimizer.defaults

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], T]) -> T: ...
    def step(self, closure: Callable[[], T] | None = None) -> T | None:
        """Does engine.step(), after the closure if there is one."""
        loss = loss_of(closure)
        self._live_engine().step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops every gradient, as engine.zero_grad() does."""
        self._live_engine().zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the states; under "masters" its part of the fp32 masters, by name, where parameters are
        only their 16-bit copies; under "loss_scaler" the loss scale where the mode has one."""
        state = self.optimizer.state_dict()
        masters = self._live_engine().masters()
        if masters:
            state["masters"] = masters
        if self.needs_scaler():
            state["loss_scaler"] = self.loss_scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what state_dict() gave on this rank of an equally large world. Collective; weights that are loaded too
        come before, for masters become what is written to the weights."""
        states = dict(state_dict)
        scaler, masters = states.pop("loss_scaler", None), states.pop("masters", None)
        self.optimizer.load_state_dict(states)
        if masters is not None:
            self._live_engine().load_masters(masters)
        if scaler is not None:
            self.loss_scaler.load_state_dict(scaler)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as in torch, on all ranks alike. Its parameters are trained from the next step on; those that
        are not of the model start with rank 0's values. A refused group is not added. See docs/freezing_and_lora.md."""
        self._live_engine().add_param_group(param_group)

    @property
    def loss_scaler(self) -> LossScaler:
        """The loss scale with all its counters."""
        return self._live_engine().loss_scaler

    loss_scale_config = loss_scaler

    @property
    def loss_scale(self) -> float:
        """The present loss scale. Can be set between steps, on all ranks alike."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.loss_scaler.loss_scale = scale

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale moves by itself."""
        return self.loss_scaler.dynamic

    def override_loss_scale(self, loss_scale: float) -> None:
        """A scale of your own: fixed from here on, and needs_scaler() is true."""
        self.loss_scaler.override(loss_scale)

    def needs_scaler(self) -> bool:
        """Direct backwards need engine.scale()."""
        return self.loss_scaler.needed

    def register_step_pre_hook(self, hook: BeforeStep) -> RemovableHandle:
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: AfterStep) -> RemovableHandle:
        return self.optimizer.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: OfState, prepend: bool = False) -> RemovableHandle:
        return self.optimizer.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: WithState, prepend: bool = False) -> RemovableHandle:
        return self.optimizer.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: WithState, prepend: bool = False) -> RemovableHandle:
        return self.optimizer.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: OfState, prepend: bool = False) -> RemovableHandle:
        return self.optimizer.register_load_state_dict_post_hook(hook, prepend)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError("[Optimizer] cannot be pickled or copied; use state_dict()")


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Schedulers of torch look whether a step came before theirs."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
