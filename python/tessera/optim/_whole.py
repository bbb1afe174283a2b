"""Optimizers whose update of an element depends on the whole parameter: Lamb (norms of each parameter) and Muon (an
orthogonal matrix near the momentum). Alone they update parameters as any optimizer of torch. In an engine they hold
slices of the fp32 masters, and ask `shards` for what of a parameter lies on other ranks; step() is collective then."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from tessera._loans import loss_of
from tessera.errors import ConfigError
from tessera.optim._alone import check_rates, defaults_of

_NEWTON_SCHULZ = (
    3.4445,
    -4.7750,
    2.0315,
)  # coefficients a, b, c of Jordan et al., https://kellerjordan.github.io/posts/muon
_SMALLEST_NORM = 1e-7
_NS_METHODS = ("standard", "gram")  # two ways to compute one polynomial
# What of a configured Muon is updated as by AdamW, where the configuration does not say (DeepSpeed's values).
AUX_ADAM: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10}
_IMPLEMENTATIONS = ("torch_adam", "foreach")  # arguments that choose one elsewhere


class Shards(Protocol):
    """What an optimizer of slices needs of the other ranks. Every rank makes the same calls in the same order."""

    def whole(self, param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """The parameter-shaped tensor that `part` is this rank's slice of, in fp32. Collective."""

    def mine(self, param: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        """This rank's slice of it."""

    def norms(self, values: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """The L2 norms of whole tensors, of (parameter, this rank's slice): 1-D, fp64. Collective."""


class _Alone:
    """Parameters are whole."""

    def whole(self, param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return part

    def mine(self, param: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        return full

    def norms(self, values: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        return torch.stack([squares(value) for _, value in values]).sqrt()


def squares(value: torch.Tensor) -> torch.Tensor:
    return value.double().square().sum()


class WholeOptimizer(torch.optim.Optimizer):
    shards: Shards = _Alone()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        self._update()
        return loss

    def _update(self) -> None:
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # of a version that did not have them
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def _present(self) -> list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
        """(group, parameter, gradient), the same on all ranks."""
        return [(g, p, p.grad) for g in self.param_groups for p in g["params"] if p.grad is not None]

    def _moments(
        self, param: torch.Tensor, grad: torch.Tensor, betas: tuple[float, float]
    ) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Adam's: the step that this is, exp_avg and exp_avg_sq with this gradient in them."""
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 1 - betas[0])
        state["exp_avg_sq"].mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
        return int(state["step"].item()), state["exp_avg"], state["exp_avg_sq"]


class Lamb(WholeOptimizer):
    """LAMB (You et al., arXiv:1904.00962, algorithm 2): Adam's direction plus weight_decay * w, scaled for every
    parameter by |w| / |direction|, which is kept within min_coeff and max_coeff; 1 where either norm is 0. Bias
    correction, as in FusedLamb's configurations, is applied to the rate and not to the moments. `eps_inside_sqrt`: the
    direction is mean / sqrt(square + eps), else mean / (sqrt(square) + eps)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        eps_inside_sqrt: bool = False,
        amsgrad: bool = False,
    ) -> None:
        check_rates("Lamb", lr, betas, eps)
        if amsgrad:
            raise RuntimeError("[Lamb] amsgrad is not supported; leave it out")
        if not 0 < min_coeff <= max_coeff:
            raise ConfigError(f"[Lamb] 0 < min_coeff <= max_coeff must hold, got {min_coeff} and {max_coeff}")
        super().__init__(params, defaults_of(locals()))

    def _update(self) -> None:
        present = self._present()
        if not present:
            return
        steps, directions = [], []
        for group, param, grad in present:
            step, mean, square = self._moments(param, grad, group["betas"])
            inside, eps = group["eps_inside_sqrt"], group["eps"]
            direction = mean / (square.add(eps).sqrt_() if inside else square.sqrt().add_(eps))
            directions.append(direction.add_(param, alpha=group["weight_decay"]))
            steps.append(step)
        params = [param for _, param, _ in present]
        norms = self.shards.norms(list(zip(params * 2, params + directions, strict=True))).tolist()
        for number, (group, param, _) in enumerate(present):
            weight, update = norms[number], norms[number + len(present)]
            trust = min(max(weight / update, group["min_coeff"]), group["max_coeff"]) if weight and update else 1.0
            rate = group["lr"]
            if group["bias_correction"]:
                first, second = (1 - beta ** steps[number] for beta in group["betas"])
                rate *= second**0.5 / first
            param.add_(directions[number], alpha=-rate * trust)


class Muon(WholeOptimizer):
    """Muon (Jordan et al.): Nesterov momentum, made a nearly orthogonal matrix by five steps of a Newton-Schulz
    iteration in bf16, times sqrt(max(1, rows / columns)); decoupled weight decay. Parameters of more than two
    dimensions count as matrices of their first one. Groups with use_muon False (vectors, embeddings, heads) are updated
    as by AdamW (Adam with `adam_w_mode` False), with their `lr`, betas and eps. In an engine every rank gathers one
    matrix after the other and computes all of them."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        use_muon: bool = True,
        ns_method: str = "standard",
        adam_w_mode: bool = True,
    ) -> None:
        check_rates("Muon", lr, betas, eps)
        if not 0 <= momentum < 1 or ns_steps < 1:
            raise ConfigError(f"[Muon] momentum must be in [0, 1) and ns_steps >= 1, got {momentum} and {ns_steps}")
        if ns_method not in _NS_METHODS:
            raise ConfigError(f"[Muon] ns_method must be one of {', '.join(_NS_METHODS)}, got {ns_method!r}")
        super().__init__(params, defaults_of(locals()))
        for group in self.param_groups:
            vectors = [p for p in group["params"] if group["use_muon"] and p.dim() < 2]
            if vectors:
                raise ConfigError(
                    f"[Muon] {len(vectors)} parameters have fewer than two dimensions: put them into a group with "
                    "use_muon False"
                )

    def _update(self) -> None:
        for group, param, grad in self._present():
            if group["use_muon"]:
                self._step_of_matrix(group, param, grad)
            else:
                self._step_of_adam(group, param, grad)

    def _step_of_matrix(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        buffer, momentum = state["momentum_buffer"], group["momentum"]
        buffer.lerp_(grad, 1 - momentum)
        update = self.shards.whole(param, grad.lerp(buffer, momentum) if group["nesterov"] else buffer)
        matrix = update.reshape(update.shape[0], -1)
        near = orthogonal(matrix, group["ns_steps"]).view(update.shape)
        rate = group["lr"] * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(self.shards.mine(param, near).view(param.shape), alpha=-rate)

    def _step_of_adam(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        if not group["adam_w_mode"]:
            grad = grad.add(param, alpha=group["weight_decay"])
        step, mean, square = self._moments(param, grad, group["betas"])
        first, second = (1 - beta**step for beta in group["betas"])
        if group["adam_w_mode"]:
            param.mul_(1 - group["lr"] * group["weight_decay"])
        param.addcdiv_(mean, (square.sqrt() / second**0.5).add_(group["eps"]), value=-group["lr"] / first)


def orthogonal(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """A matrix of the same singular vectors whose singular values are near 1, in bf16."""
    a, b, c = _NEWTON_SCHULZ
    x = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def muon_groups(
    named: Iterable[tuple[str, torch.Tensor]],
    groups: list[dict[str, Any]],
    params: dict[str, Any],
    keep_empty: bool = False,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Param groups and arguments of Muon for `optimizer.params` of a configuration: what `param.use_muon` says is a
    matrix, else what has two dimensions and neither "embed" nor "lm_head" in its name. muon_lr and adam_lr go before
    lr."""
    names = {id(param): name for name, param in named}
    params = {name: value for name, value in params.items() if name not in _IMPLEMENTATIONS}
    of_muon, of_adam = ({"lr": params["lr"]} if "lr" in params else {} for _ in range(2))
    for name, own in (("muon_lr", of_muon), ("adam_lr", of_adam)):
        if name in params:
            own["lr"] = params.pop(name)
    own_of = {True: of_muon, False: {k: v for k, v in AUX_ADAM.items() if k not in params} | of_adam}

    def is_matrix(param: torch.Tensor) -> bool:
        chosen = getattr(param, "use_muon", None)
        name = names.get(id(param), "")
        return (
            bool(param.dim() >= 2 and "embed" not in name and "lm_head" not in name) if chosen is None else bool(chosen)
        )

    split = []
    for group in groups:
        for use in (True, False):
            members = [p for p in group["params"] if is_matrix(p) == use]
            if members or keep_empty:
                split.append({**own_of[use], **group, "params": members, "use_muon": use})
    return split, params
