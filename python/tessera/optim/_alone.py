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

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_UNSERVED = ("amsgrad", "capturable", "differentiable")


def check_rates(name: str, lr: float, betas: tuple[float, float], eps: float) -> None:
    wrong = []
    if not lr >= 0:
        wrong.append(f"lr must be >= 0, got {lr}")
    wrong += [f"beta {i} must be in [0, 1), got {beta}" for i, beta in enumerate(betas) if not 0 <= beta < 1]
    if not eps >= 0:
        wrong.append(f"eps must be >= 0, got {eps}")
    if wrong:
        raise ConfigError(f"[{name}] " + "; ".join(wrong))


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
    params: list[torch.Tensor]
    firsts: list[int]  # numbers of their first elements among those of all parameters


class KernelOptimizer(torch.optim.Optimizer):
    """The base. A param group has the arguments of the constructor by their names."""

    _rule: _core.Rule
    _states: tuple[str, ...]
    _on_cpu_only = True

    def fill(self, group: Group, options: _core.GroupOptions) -> None:
        """The hyper-parameters of a param group in the core's terms."""
        options.lr = float(group["lr"])
        options.weight_decay = group["weight_decay"]
        options.maximize = group["maximize"]

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
            self._check_range(number, group)
            work = _Work(group, [], [])
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
        options = _core.GroupOptions()
        self.fill(work.group, options)
        _core.update_tensors(
            self._rule,
            options,
            work.params,
            [param.grad for param in work.params],  # type: ignore[misc]
            [[state[name] for state in states] for name in self._states],
            [state["step"] for state in states],
            work.firsts,
            work.group["stochastic_rounding"],
            work.group["seed"],
        )

    def _check(self, param: torch.Tensor, group: int, index: int) -> None:
        if self._on_cpu_only and not param.is_cpu:
            says = f"is on {param.device}: outside an engine parameters on the CPU are updated, others by torch.optim"
        elif param.dtype not in _DTYPES:
            says = f"is {param.dtype}; served are float32, bfloat16 and float16"
        elif param.grad is not None and param.grad.layout != torch.strided:
            says = "has a sparse gradient, which is not served: build its module with sparse=False"
        else:
            return
        raise ConfigError(f"[{self._name}] parameter {index} of group {group} {says}")

    def _check_group(self, number: int, group: Group) -> None:
        for name in _UNSERVED:
            if group.get(name):
                raise RuntimeError(
                    f"[{self._name}] {name} is not supported (param group {number}); use the class of torch.optim"
                )

    def _check_range(self, number: int, group: Group) -> None:
        options = _core.GroupOptions()
        self.fill(group, options)
        if wrong := _core.wrong_in_group(self._rule, options):
            raise ConfigError(f"[{self._name}] param group {number}: {wrong}")

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
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        bias_correction: bool = True,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        check_rates(self._name, float(lr), betas, eps)
        self._check_group(0, {"amsgrad": amsgrad})
        super().__init__(params, defaults_of(locals()))

    def _decoupled(self, group: Group) -> bool:
        return bool(group["decoupled_weight_decay"])

    def fill(self, group: Group, options: _core.GroupOptions) -> None:
        super().fill(group, options)
        options.beta1, options.beta2 = map(float, group["betas"])
        options.eps = group["eps"]
        options.bias_correction = group["bias_correction"]
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
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
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
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
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
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        check_rates(self._name, float(lr), betas, 0.0)
        super().__init__(params, defaults_of(locals()))

    def fill(self, group: Group, options: _core.GroupOptions) -> None:
        super().fill(group, options)
        options.beta1, options.beta2 = map(float, group["betas"])


class Adagrad(KernelOptimizer):
    """Adagrad (Duchi et al., 2011) with the arguments of torch.optim.Adagrad. Sums exist from the start, as there."""

    _rule = _core.Rule.Adagrad
    _states = ("sum",)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        check_rates(self._name, float(lr), (0.0, 0.0), eps)
        if not lr_decay >= 0 or not initial_accumulator_value >= 0:
            raise ConfigError(
                f"[{self._name}] lr_decay and initial_accumulator_value must be >= 0, got {lr_decay} and "
                f"{initial_accumulator_value}"
            )
        super().__init__(params, defaults_of(locals()))
        for group in self.param_groups:
            for param in group["params"]:
                self._state(param, group)

    def fill(self, group: Group, options: _core.GroupOptions) -> None:
        super().fill(group, options)
        options.lr_decay = group["lr_decay"]
        options.initial_accumulator_value = group["initial_accumulator_value"]
        options.eps = group["eps"]
