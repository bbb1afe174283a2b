"""Optimizers whose update of an element depends on the whole parameter: Lamb (norms of each parameter), Muon (an
orthogonal matrix near the momentum) and Adafactor (means over rows and columns). The core computes all of them
(optim/whole.h). Alone they update parameters as any optimizer of torch. In an engine they hold slices of the fp32
masters, and `shards` has what of a parameter lies on other ranks; step() is collective then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch.optim.optimizer import ParamsT

from tessera import _core
from tessera._loans import loss_of
from tessera.errors import ConfigError
from tessera.optim._alone import defaults_in_table, defaults_of

_NS_METHODS = ("standard", "gram")  # two ways to compute one polynomial
_OF_LAMB, _OF_MUON, _OF_ADAFACTOR = map(defaults_in_table, ("Lamb", "Muon", "Adafactor"))
_OTHERS = _core.options_of_type("Muon").others
assert _OTHERS is not None
# Settings of what a configured Muon updates as AdamW, where the configuration does not say (DeepSpeed's values).
_OF_OTHERS = _core.group_values(_core.Rule.Muon, _OTHERS)
T = TypeVar("T")
AUX_ADAM: dict[str, Any] = {name: _OF_OTHERS[name] for name in ("lr", "betas", "eps")}


class WholeOptimizer(torch.optim.Optimizer):
    _rule: _core.Rule
    shards: _core.Shards | None = None  # an engine's; None: parameters are whole
    numbers: Mapping[int, int] = {}  # the parameters' numbers for shards, by id

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], T]) -> T: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], T] | None = None) -> T | None:
        """Updates all parameters that have a gradient; returns what `closure` gave, or None."""
        loss = loss_of(closure)
        groups = [self.check_group(number, group) for number, group in enumerate(self.param_groups)]
        numbers, params, states, names = [], [], [], []
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:  # parameters with gradients are the same on all ranks
                if param.grad is not None:
                    numbers.append(number)
                    params.append(param)
                    kept = self._states_of(param, groups[number])
                    names.append([key for key, _ in kept])
                    states.append(self._state(param, kept))
        _core.update_whole(
            self._rule,
            groups,
            numbers,
            params,
            [param.grad for param in params],
            [[state[key] for key in keys] for state, keys in zip(states, names, strict=True)],
            [int(state.get("step", 1)) for state in states],
            [self.numbers.get(id(param), -1) for param in params],
            self.shards,
        )
        return loss

    def options(self, group: dict[str, Any]) -> _core.GroupOptions:
        """The hyper-parameters of a param group in the core's terms."""
        options = _core.GroupOptions()
        _core.read_group(self._rule, group, options)
        return options

    def check_group(self, number: int, group: dict[str, Any]) -> _core.GroupOptions:
        """options(). ConfigError for what is beyond the bounds of a configuration."""
        options = self.options(group)
        _core.check_group(self._rule, options, type(self).__name__, number)
        return options

    def whole_states(self, sizes: Sequence[int]) -> frozenset[str]:
        """The states of a parameter of these sizes that every rank has whole."""
        states = _core.whole_states(self._rule, _core.GroupOptions(), sizes)
        return frozenset(key for key, whole in states if whole is not None)

    def _states_of(self, param: torch.Tensor, group: _core.GroupOptions) -> list[tuple[str, list[int] | None]]:
        number = self.numbers.get(id(param), -1)
        sizes = list(param.shape) if self.shards is None else self.shards.sizes(number, param)
        return _core.whole_states(self._rule, group, sizes)

    def _state(self, param: torch.Tensor, kept: list[tuple[str, list[int] | None]]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            if "momentum_buffer" not in dict(kept):
                state["step"] = torch.tensor(0.0)
            state.update({k: torch.zeros_like(param) if n is None else param.new_zeros(n) for k, n in kept})
        if "step" in state:
            state["step"] += 1
        return state

    def _check(self) -> None:
        _core.check_group(self._rule, self.options(self.defaults), "")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # groups of a version that did not have them
            for name, value in self.defaults.items():
                group.setdefault(name, value)


class Lamb(WholeOptimizer):
    """LAMB (You et al., arXiv:1904.00962, algorithm 2): Adam's direction plus weight_decay * w, scaled for every
    parameter by |w| / |direction|, which is kept within min_coeff and max_coeff; 1 where either norm is 0. Bias
    correction, as in FusedLamb's configurations, is applied to the rate and not to the moments. `eps_inside_sqrt`: the
    direction is mean / sqrt(square + eps), else mean / (sqrt(square) + eps). Alone it computes in the parameter's
    dtype: in fp16 an eps below 2**-25 is 0, and a gradient of zeros gives NaN, as with torch.optim.Adam."""

    _rule = _core.Rule.Lamb

    def __init__(
        self,
        params: ParamsT,
        lr: float = _OF_LAMB["lr"],
        bias_correction: bool = _OF_LAMB["bias_correction"],
        betas: tuple[float, float] = _OF_LAMB["betas"],
        eps: float = _OF_LAMB["eps"],
        weight_decay: float = _OF_LAMB["weight_decay"],
        max_coeff: float = _OF_LAMB["max_coeff"],
        min_coeff: float = _OF_LAMB["min_coeff"],
        eps_inside_sqrt: bool = _OF_LAMB["eps_inside_sqrt"],
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("[Lamb] amsgrad is not supported; leave it out")
        super().__init__(params, defaults_of(locals()))
        self._check()


class Muon(WholeOptimizer):
    """Muon (Jordan et al.): Nesterov momentum, made a nearly orthogonal matrix by five steps of a Newton-Schulz
    iteration in bf16, times sqrt(max(1, rows / columns)); decoupled weight decay. Parameters of more than two
    dimensions count as matrices of the first dimension. Groups with use_muon False (vectors, embeddings, heads) are
    updated as by AdamW (Adam with `adam_w_mode` False), with their `lr`, betas and eps. In an engine every rank gathers
    one matrix after the other and computes all of them."""

    _rule = _core.Rule.Muon

    def __init__(
        self,
        params: ParamsT,
        lr: float = _OF_MUON["lr"],
        momentum: float = _OF_MUON["momentum"],
        weight_decay: float = _OF_MUON["weight_decay"],
        nesterov: bool = _OF_MUON["nesterov"],
        ns_steps: int = _OF_MUON["ns_steps"],
        betas: tuple[float, float] = _OF_MUON["betas"],
        eps: float = _OF_MUON["eps"],
        use_muon: bool = _OF_MUON["use_muon"],
        ns_method: str = "standard",
        adam_w_mode: bool = _OF_MUON["adam_w_mode"],
    ) -> None:
        if ns_method not in _NS_METHODS:
            raise ConfigError(f"[Muon] ns_method must be one of {', '.join(_NS_METHODS)}, got {ns_method!r}")
        super().__init__(params, defaults_of(locals()))
        self._check()
        for group in self.param_groups:
            vectors = [p for p in group["params"] if group["use_muon"] and p.dim() < 2]
            if vectors:
                raise ConfigError(
                    f"[Muon] {len(vectors)} parameters have fewer than two dimensions: put them into a group with "
                    "use_muon False"
                )


class Adafactor(WholeOptimizer):
    """torch.optim.Adafactor, with its arguments, arithmetic and states. In an engine every rank has the means of rows
    and columns whole, gathers gradient and values of one parameter after the other, and computes all of them."""

    _rule = _core.Rule.Adafactor

    def __init__(
        self,
        params: ParamsT,
        lr: float = _OF_ADAFACTOR["lr"],
        beta2_decay: float = _OF_ADAFACTOR["beta2_decay"],
        eps: tuple[float | None, float] = _OF_ADAFACTOR["eps"],
        d: float = _OF_ADAFACTOR["d"],
        weight_decay: float = _OF_ADAFACTOR["weight_decay"],
        maximize: bool = _OF_ADAFACTOR["maximize"],
    ) -> None:
        super().__init__(params, defaults_of(locals()))
        self._check()

    def options(self, group: dict[str, Any]) -> _core.GroupOptions:
        if (first := group["eps"][0]) is not None and not first >= 0:  # the core has a number below 0 for None
            raise ConfigError(f"[Adafactor] eps 0 must be >= 0, got {first}")
        return super().options(group)


def orthogonal(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """A matrix of the same singular vectors whose singular values are near 1, in bf16."""
    return _core.orthogonal(matrix, steps)


def is_matrix(param: torch.Tensor, name: str) -> bool:
    """Whether Muon updates a parameter: what `param.use_muon` says, else the core's rule by name and dimensions."""
    chosen = getattr(param, "use_muon", None)
    return _core.is_muon_matrix(name, param.dim()) if chosen is None else bool(chosen)


def muon_groups(
    named: Iterable[tuple[str, torch.Tensor]],
    groups: list[dict[str, Any]],
    configured: _core.OptimizerOptions,
    keep_empty: bool = False,
) -> list[dict[str, Any]]:
    """Param groups of Muon for these: of each the matrices, then the others."""
    assert configured.others is not None
    names = {id(param): name for name, param in named}
    values = {
        use: _core.group_values(_core.Rule.Muon, options)
        for use, options in ((True, configured.defaults), (False, configured.others))
    }
    split = []
    for group in groups:
        for use in (True, False):
            members = [p for p in group["params"] if is_matrix(p, names.get(id(p), "")) == use]
            if members or keep_empty:
                split.append({**values[use], **group, "params": members, "use_muon": use})
    return split
