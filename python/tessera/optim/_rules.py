"""Which optimizers of torch run on the core's kernels, and their hyper-parameters in the core's terms."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from tessera import _core
from tessera.errors import ConfigError
from tessera.optim._alone import UNSERVED, Adagrad, Adam, AdamW, FusedAdam, KernelOptimizer, Lion
from tessera.optim._whole import WholeOptimizer

Group = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class NativeRule:
    """How one optimizer class runs natively."""

    rule: _core.Rule
    counts_steps: bool  # the rule's state has "step"
    state_from_start: bool = False  # the rule's state exists before the first update

    def read(self, optimizer: torch.optim.Optimizer, group: Group, options: _core.GroupOptions) -> None:
        """Takes what a param group has of the hyper-parameters in the core's table."""
        if isinstance(optimizer, KernelOptimizer):
            optimizer.fill(group, options)
            return
        _core.read_group(self.rule, group, options)
        if self.rule == _core.Rule.Adam:
            options.decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay", False)


_ADAM, _ADAGRAD = NativeRule(_core.Rule.Adam, True), NativeRule(_core.Rule.Adagrad, True, True)
_RULES: dict[type, NativeRule] = {
    **dict.fromkeys((torch.optim.Adam, torch.optim.AdamW, Adam, AdamW, FusedAdam), _ADAM),
    **dict.fromkeys((torch.optim.Adagrad, Adagrad), _ADAGRAD),
    torch.optim.SGD: NativeRule(_core.Rule.Sgd, False),
    Lion: NativeRule(_core.Rule.Lion, True),
}

# Classes whose step is element by element: as external optimizers they may work on flat shards.
_ELEMENTWISE = frozenset(_RULES)


# An attribute of a class that updates as another one does, and only spells its arguments differently: that class.
_SAME_AS = "same_update_as"


def _class_of(optimizer: torch.optim.Optimizer) -> type:
    return vars(type(optimizer)).get(_SAME_AS, type(optimizer))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


@functools.cache
def _names(rule: _core.Rule) -> tuple[str, ...]:
    return tuple(_core.group_values(rule, _core.GroupOptions()))


def _runs_natively(rule: NativeRule, group: Group) -> bool:
    if any(group.get(flag) for flag in UNSERVED):
        return False
    values = {name: group[name] for name in _names(rule.rule) if name in group}
    return all(map(_is_number, (*values.pop("betas", ()), *values.values())))


def native_rule(optimizer: torch.optim.Optimizer) -> NativeRule | None:
    """The rule for an optimizer, by exact class (or the one it says it equals); None when it has to run itself."""
    rule = _RULES.get(_class_of(optimizer))
    if rule is None or not all(_runs_natively(rule, group) for group in optimizer.param_groups):
        return None
    return rule


def note_group(group: Group, options: _core.GroupOptions) -> None:
    """Copies what of an optimizer's hyper-parameters are numbers at hand: for ranks to compare."""

    def note(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_cpu:
            value = value.item()
        if _is_number(value):
            setattr(options, name, float(value))

    for name in ("lr", "eps", "weight_decay", "momentum", "dampening", "lr_decay"):
        note(name, group.get(name))
    betas = group.get("betas")
    for name, value in zip(("beta1", "beta2"), betas if isinstance(betas, (tuple, list)) else (), strict=False):
        note(name, value)


_NOTED = ("params", "param_names", "lr", "eps", "weight_decay", "momentum", "dampening", "lr_decay", "betas")


def other_names(group: Group) -> list[str]:
    """Names that a client's optimizer has in a param group from the start and note_group() leaves, to be compared."""
    return sorted(name for name in group if name not in _NOTED)


def other_terms(group: Group, number: int, names: list[str]) -> list[str]:
    """The values of such names, as lines. Later names are the optimizer's own: ranks without a part of a group may lack
    them."""
    return [f"{name} {_text(group.get(name))} in param group {number}" for name in names]


def device_terms(group: Group, number: int, names: list[str]) -> list[tuple[str, str, torch.Tensor]]:
    """Numbers on a device, for which the host need not wait to compare them."""
    found = []
    for name in (*_NOTED[2:], *names):
        value = group.get(name)
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, torch.Tensor) and one.numel() == 1 and not one.is_cpu and not one.is_complex():
                found.append((name, f"in param group {number}", one))
    return found


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _text(value.item()) if value.numel() == 1 and value.is_cpu else "a tensor"
    if isinstance(value, (tuple, list)) and len(value) <= 16:
        return f"({', '.join(map(_text, value))})"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"


def is_tested(optimizer: torch.optim.Optimizer) -> bool:
    """True for classes that are known to work on slices of parameters."""
    return _class_of(optimizer) in _ELEMENTWISE or isinstance(optimizer, WholeOptimizer)


def read_group(rule: NativeRule, optimizer: torch.optim.Optimizer, index: int, options: _core.GroupOptions) -> None:
    """Copies the present hyper-parameters of a param group. ConfigError when they left what the kernels compute."""
    group = optimizer.param_groups[index]
    if not _runs_natively(rule, group):
        raise ConfigError(
            f"[engine.step] param group {index} asks for what this engine was not built for (a rate that is no number, "
            f"such as a tensor; {', '.join(UNSERVED)}); set it before tessera.initialize"
        )
    rule.read(optimizer, group, options)
