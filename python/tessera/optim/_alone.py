"""Optimizers over the core's kernels. Alone they update parameters in place, in one pass a parameter; in an engine the
core runs their rule over the sharded masters, and their step() is the engine's.

Note [Parameters without an engine]
  fp32, bf16 and fp16 parameters of any layout, on the CPU. States are fp32 whatever the parameter is. A 16-bit
  parameter is its own master: it is read as fp32, updated, and rounded to nearest, so that updates below half a step of
  its format are lost; with `stochastic_rounding` they are kept in the mean. Random bits depend on `seed`, the
  parameter's step and the element, on nothing else, so that a resumed run draws the same.

state_dict() has torch's names (step, exp_avg, exp_avg_sq, sum) and is exchanged with torch.optim's class of the same
name in both directions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar, overload

import torch
from torch.optim.optimizer import ParamsT

from tessera import _core
from tessera._loans import loss_of
from tessera.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Unpack

Group = dict[str, Any]
T = TypeVar("T")

# Options that ask for something else than the kernels compute.
UNSERVED = ("amsgrad", "capturable", "differentiable")


def defaults_in_table(name: str) -> dict[str, Any]:
    """What the core's table of optimizers has for a type, by the names of param groups."""
    kind = _core.options_of_type(name)
    return _core.group_values(kind.rule, kind.defaults)


_ADAM, _LION, _ADAGRAD = map(defaults_in_table, ("Adam", "Lion", "Adagrad"))


def defaults_of(arguments: dict[str, Any]) -> Group:
    """The values that a param group has: the arguments of a constructor (its locals()) that are not about something
    else."""
    others = ("self", "__class__", "params", "amsgrad", "ns_method")
    found = {name: value for name, value in arguments.items() if name not in others}
    return found | {"betas": tuple(found["betas"])} if "betas" in found else found


class _Held:
    """A state on its way through torch's load_state_dict, which would round it to the dtype of its parameter."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def _hold(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
    def held(name: str, value: Any) -> Any:
        return _Held(value) if isinstance(value, torch.Tensor) and name != "step" else value

    states = {key: {name: held(name, v) for name, v in state.items()} for key, state in loaded["state"].items()}
    return {**loaded, "state": states}


class _Work(NamedTuple):
    """The work of one group."""

    group: Group
    options: _core.GroupOptions
    params: list[torch.Tensor]
    firsts: list[int]  # numbers of their first elements among those of all parameters


class KernelOptimizer(torch.optim.Optimizer):
    """The base. A param group has the arguments of the constructor by their names."""

    _rule: _core.Rule
    _states: tuple[str, ...]
    _on_cpu_only = True

    def __init__(self, params: ParamsT, defaults: Group, amsgrad: bool = False) -> None:
        self._check_group(0, {"amsgrad": amsgrad})
        super().__init__(params, defaults)
        self._options(self.defaults)

    def fill(self, group: Group, options: _core.GroupOptions) -> None:
        """The hyper-parameters of a param group in the core's terms."""
        _core.read_group(self._rule, group, options)

    def _options(self, group: Group, number: int | None = None) -> _core.GroupOptions:
        """The same, within their bounds, or ConfigError."""
        options = _core.GroupOptions()
        self.fill(group, options)
        _core.check_group(self._rule, options, self._name, number)
        return options

    def _state_dtype(self, param: torch.Tensor) -> torch.dtype:
        return torch.float32

    @property
    def _name(self) -> str:
        return type(self).__name__

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], T]) -> T: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], T] | None = None) -> T | None:
        """Updates every parameter that has a gradient. ConfigError, before anything is changed, for one it cannot."""
        loss = loss_of(closure)
        first, works = 0, []
        for number, group in enumerate(self.param_groups):
            self._check_group(number, group)
            work = _Work(group, self._options(group, number), [], [])
            for index, param in enumerate(group["params"]):
                if param.grad is not None:
                    self._check(param, number, index)
                    work.params.append(param)
                    work.firsts.append(first)
                first += param.numel()
            works.append(work)
        for work in works:
            self._update(work)
        return loss

    def _update(self, work: _Work) -> None:
        states = [self._state(param, work.group) for param in work.params]
        _core.update_tensors(
            self._rule,
            work.options,
            work.params,
            [param.grad for param in work.params],  # type: ignore[misc]
            [[state[name] for state in states] for name in self._states],
            [state["step"] for state in states],
            work.firsts,
            work.group["stochastic_rounding"],
            work.group["seed"],
        )

    def _check(self, param: torch.Tensor, group: int, index: int) -> None:
        if says := _core.wrong_param(self._rule, self._on_cpu_only, param):
            raise ConfigError(f"[{self._name}] parameter {index} of group {group} {says}")

    def _check_group(self, number: int, group: Group) -> None:
        for name in UNSERVED:
            if group.get(name):
                raise RuntimeError(
                    f"[{self._name}] {name} is not supported (param group {number}); use the class of torch.optim"
                )

    def _state(self, param: torch.Tensor, group: Group) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            initial = group.get("initial_accumulator_value", 0.0)
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            for name in self._states:
                state[name] = torch.full_like(param, initial, dtype=self._state_dtype(param), requires_grad=False)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what state_dict() of this class or of torch.optim's gave, for parameters in the same order."""
        for number, group in enumerate(state_dict["param_groups"]):
            self._check_group(number, group)
        for key, state in state_dict["state"].items():
            missing = [name for name in self._states if state and name not in state]
            if missing:
                raise ConfigError(
                    f"[{self._name}.load_state_dict] the state of parameter {key} has no {', '.join(missing)}; it has "
                    f"{', '.join(map(str, state))}"
                )
        handle = self.register_load_state_dict_pre_hook(_hold)  # the last one
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        for param, values in self.state.items():
            if not isinstance(values, dict):
                continue
            for name, value in values.items():
                if isinstance(value, _Held):
                    values[name] = value.value.to(param.device, self._state_dtype(param))
                elif name == "step" and not isinstance(value, torch.Tensor):
                    values[name] = torch.tensor(float(value), dtype=torch.float32)


class Adam(KernelOptimizer):
    """Adam (Kingma & Ba, arXiv:1412.6980) with the arguments of torch.optim.Adam; `decoupled_weight_decay` makes it
    AdamW. amsgrad is refused."""

    _rule = _core.Rule.Adam
    _states = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float = _ADAM["lr"],
        betas: tuple[float, float] = _ADAM["betas"],
        eps: float = _ADAM["eps"],
        weight_decay: float = _ADAM["weight_decay"],
        amsgrad: bool = False,
        *,
        maximize: bool = _ADAM["maximize"],
        decoupled_weight_decay: bool = False,
        bias_correction: bool = _ADAM["bias_correction"],
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(params, defaults_of(locals()), amsgrad)

    def _decoupled(self, group: Group) -> bool:
        return bool(group["decoupled_weight_decay"])

    def fill(self, group: Group, options: _core.GroupOptions) -> None:
        super().fill(group, options)
        options.decoupled = self._decoupled(group)


class FusedMore(TypedDict, total=False):
    """Keywords of Adam that FusedAdam takes, too."""

    maximize: bool
    decoupled_weight_decay: bool
    stochastic_rounding: bool
    seed: int


class More(FusedMore, total=False):
    """Those that AdamW takes, too."""

    bias_correction: bool


class AdamW(Adam):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) with the arguments of torch.optim.AdamW. amsgrad is refused."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = _ADAM["lr"],
        betas: tuple[float, float] = _ADAM["betas"],
        eps: float = _ADAM["eps"],
        weight_decay: float = _core.torch_defaults("AdamW").weight_decay,
        amsgrad: bool = False,
        **more: Unpack[More],
    ) -> None:
        more["decoupled_weight_decay"] = True
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **more)

    def _decoupled(self, group: Group) -> bool:
        return bool(self.defaults["decoupled_weight_decay"])  # whatever was loaded


class FusedAdam(AdamW):
    """Adam and AdamW (`adam_w_mode`, the default) with the arguments DeepSpeed configurations use. Runs on a device,
    too, where Tessera has its kernels."""

    _on_cpu_only = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = _ADAM["lr"],
        bias_correction: bool = _ADAM["bias_correction"],
        betas: tuple[float, float] = _ADAM["betas"],
        eps: float = _ADAM["eps"],
        adam_w_mode: bool = True,
        weight_decay: float = _ADAM["weight_decay"],
        amsgrad: bool = False,
        **more: Unpack[FusedMore],
    ) -> None:
        more["decoupled_weight_decay"] = adam_w_mode
        Adam.__init__(self, params, lr, betas, eps, weight_decay, amsgrad, bias_correction=bias_correction, **more)

    @property
    def adam_w_mode(self) -> bool:
        """Whether weight decay is decoupled (AdamW)."""
        return bool(self.defaults["decoupled_weight_decay"])


class Lion(KernelOptimizer):
    """Lion (Chen et al., arXiv:2302.06675): the sign of an interpolated momentum, decoupled weight decay."""

    _rule = _core.Rule.Lion
    _states = ("exp_avg",)

    def __init__(
        self,
        params: ParamsT,
        lr: float = _LION["lr"],
        betas: tuple[float, float] = _LION["betas"],
        weight_decay: float = _LION["weight_decay"],
        *,
        maximize: bool = _LION["maximize"],
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(params, defaults_of(locals()))


class Adagrad(KernelOptimizer):
    """Adagrad (Duchi et al., 2011) with the arguments of torch.optim.Adagrad. Sums exist from the start, as there."""

    _rule = _core.Rule.Adagrad
    _states = ("sum",)

    def __init__(
        self,
        params: ParamsT,
        lr: float = _ADAGRAD["lr"],
        lr_decay: float = _ADAGRAD["lr_decay"],
        weight_decay: float = _ADAGRAD["weight_decay"],
        initial_accumulator_value: float = _ADAGRAD["initial_accumulator_value"],
        eps: float = _ADAGRAD["eps"],
        *,
        maximize: bool = _ADAGRAD["maximize"],
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(params, defaults_of(locals()))
        for group in self.param_groups:
            for param in group["params"]:
                self._state(param, group)
