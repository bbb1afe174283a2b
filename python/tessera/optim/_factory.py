"""Optimizers and schedules from arguments and configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tessera import _core, lr_schedules, optim
from tessera.errors import ConfigError
from tessera.optim._rules import is_tested
from tessera.optim._whole import muon_groups
from tessera.optim._wrapper import Optimizer

MakesOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
MakesScheduler = Callable[[torch.optim.Optimizer], lr_schedules.Scheduler]

ParamGroups = list[dict[str, Any]]


def build_optimizer(
    config: _core.Config,
    model: nn.Module,
    optimizer: Any,
    model_parameters: Any,
    *,
    is_cut: bool = False,
    keep_empty: bool = False,
) -> torch.optim.Optimizer | None:
    """The torch optimizer that rules: the client's, one its callable builds, or the configured one; None without any.
    `is_cut`: parameters are slices in every stage, of tensor parallelism.
    `keep_empty`: with the param groups that have nothing to train here, so that a group has one number on all stages.

    ConfigError for anything else, and for a client's class that is not known to work on slices of parameters."""
    if isinstance(optimizer, Optimizer):
        optimizer = optimizer.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        built = optimizer
    elif optimizer is not None and not callable(optimizer):
        raise ConfigError(
            "[initialize] optimizer must be a torch.optim.Optimizer or a callable that builds one, got "
            f"{type(optimizer).__name__}"
        )
    else:
        maybe = _build(config, optimizer, trainable_groups(model, model_parameters, keep_empty), model, keep_empty)
        if maybe is None:
            return None
        built = maybe
    _check_of_model(built, model)
    if isinstance(built, torch.optim.LBFGS | torch.optim.SparseAdam):
        _core.refuse_class("LBFGS" if isinstance(built, torch.optim.LBFGS) else "SparseAdam")
    if any(group.get("stochastic_rounding") for group in built.param_groups):
        _core.refuse_rounding(type(built).__name__)
    if not is_tested(built):
        _core.refuse_slices(config, type(built).__name__, is_cut)
    return built


def _check_of_model(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Parameters beside the model's own (a loss's) are trained too; with none of these it is another model's."""
    params = params_of(optimizer.param_groups)
    own = {id(param) for param in model.parameters()}
    if params and own and own.isdisjoint(map(id, params)):
        raise ConfigError(
            f"[initialize] {type(optimizer).__name__} holds no parameter of the model, which nothing would train: "
            "build it over the parameters of the very module that is handed over (not of a copy, nor of one whose "
            "parameters were replaced since)"
        )


def keep_optimizer(optimizer: Any) -> Callable[[], None]:
    """Returns a call that gives a client's optimizer the attributes, hyper-parameters and states again that it has
    now."""
    if isinstance(optimizer, Optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        return lambda: None
    attributes, groups = dict(vars(optimizer)), [dict(group) for group in optimizer.param_groups]
    lists = [list(group["params"]) for group in groups]
    rates = [(v, v.clone()) for group in groups for v in group.values() if isinstance(v, torch.Tensor)]
    states = dict(optimizer.state) if isinstance(optimizer.state, dict) else None

    def restore() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        for group, kept, params in zip(optimizer.param_groups, groups, lists, strict=True):
            group.clear()
            group.update({**kept, "params": params})
        for rate, value in rates:  # schedules write to them
            rate.copy_(value)
        if states is not None:
            optimizer.state.clear()
            optimizer.state.update(states)

    return restore


def describe(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's class and hyper-parameters, to compare between ranks."""
    return f"{class_of(optimizer)} {[plain_values(group) for group in optimizer.param_groups]}"


def class_of(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def plain_values(group: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a param group that ranks can compare."""
    values = {
        name: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in group.items()
    }
    return {name: value for name, value in values.items() if isinstance(value, bool | int | float | str | tuple)}


def trainable_groups(model: nn.Module, model_parameters: Any, keep_empty: bool = False) -> ParamGroups:
    """Param groups of what is to be trained: frozen parameters are left out, and empty groups without `keep_empty`."""
    if model_parameters is None:
        model_parameters = model.parameters()
    items = list(model_parameters)
    groups: ParamGroups
    if items and isinstance(items[0], dict):
        groups = [{**group, "params": _as_list(group["params"])} for group in items]
    else:
        groups = [{"params": items}]
    seen: set[int] = set()
    for group in groups:
        for item in group["params"]:
            param = item[1] if isinstance(item, tuple) else item
            if id(param) in seen:
                raise ConfigError("[initialize] model_parameters holds a parameter more than once")
            seen.add(id(param))
        group["params"] = [
            item for item in group["params"] if (item[1] if isinstance(item, tuple) else item).requires_grad
        ]
    return [group for group in groups if group["params"] or keep_empty]


def given_sizes(model: nn.Module, optimizer: Any, model_parameters: list[Any] | None) -> list[int]:
    """How many parameters each param group was given, frozen ones too. `model_parameters`: of as_lists()."""
    if isinstance(optimizer, Optimizer):
        optimizer = optimizer.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        return [len(group["params"]) for group in optimizer.param_groups]
    items: list[Any] = list(model.parameters()) if model_parameters is None else model_parameters
    if items and isinstance(items[0], dict):
        return [len(group["params"]) for group in items]
    return [len(items)]


def as_lists(model_parameters: Any) -> list[Any] | None:
    """Makes lists of all that can be read once only."""
    if model_parameters is None:
        return None
    if isinstance(model_parameters, nn.Module) or not isinstance(model_parameters, Iterable):
        raise ConfigError(
            "[initialize] model_parameters takes parameters or param groups, as model.parameters(), got "
            f"{type(model_parameters).__name__}"
        )
    return [{**one, "params": _as_list(one["params"])} if isinstance(one, dict) else one for one in model_parameters]


def _as_list(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _build(
    config: _core.Config,
    factory: Callable[[ParamGroups], Any] | None,
    groups: ParamGroups,
    model: nn.Module,
    keep_empty: bool,
) -> torch.optim.Optimizer | None:
    if factory is not None:
        if not groups:
            return None
        built = factory(groups)
        if not isinstance(built, torch.optim.Optimizer):
            raise ConfigError(
                f"[initialize] the optimizer callable returned {type(built).__name__}, not a torch.optim.Optimizer"
            )
        return built
    if not config.optimizer.type or not groups:
        return None
    return _from_config(config, groups, model, keep_empty)


def _given(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters that the configuration does not leave open."""
    return {name: value for name, value in params.items() if value is not None and value != "auto"}


def _from_config(
    config: _core.Config, groups: ParamGroups, model: nn.Module, keep_empty: bool
) -> torch.optim.Optimizer:
    """The core has found the parameters in order and says which rule the type has; the class is that of the rule."""
    name, params = config.optimizer.type, _given(config.optimizer.params)
    kind = _core.optimizer_kind(config)
    params.pop("fp32_optimizer_states", None)  # the configuration's precision says it
    for unused in ("capturable", "differentiable", "set_grad_none"):  # no update of an engine is captured or recorded
        params.pop(unused, None)
    cls: type[torch.optim.Optimizer]
    if kind is not None and kind.rule in (_core.Rule.Lamb, _core.Rule.Muon, _core.Rule.Adafactor):
        configured = _core.configured_optimizer(config)
        assert configured is not None
        values = _core.group_values(configured.rule, configured.defaults)
        if configured.rule == _core.Rule.Lamb:
            return optim.Lamb(groups, **values)
        if configured.rule == _core.Rule.Adafactor:
            return optim.Adafactor(groups, **values)
        return optim.Muon(muon_groups(model.named_parameters(), groups, configured, keep_empty), **values)
    if kind is None:
        found = getattr(torch.optim, name, None)
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            types = _core.optimizer_types()
            raise ConfigError(
                f"[config] optimizer.type {name!r} is neither one of {', '.join(types)} nor a class of torch.optim "
                f"(exact spelling){_meant(name, types, torch.optim, torch.optim.Optimizer)}"
            )
        cls = found
    elif kind.rule == _core.Rule.Adam:
        decoupled = kind.defaults.decoupled
        use_torch = params.pop("torch_adam", False)
        params.pop("adam_w_mode", None)
        if use_torch:
            cls = torch.optim.AdamW if decoupled else torch.optim.Adam
        else:
            cls, params["adam_w_mode"] = optim.FusedAdam, decoupled
    else:
        cls = {_core.Rule.Sgd: torch.optim.SGD, _core.Rule.Adagrad: torch.optim.Adagrad, _core.Rule.Lion: optim.Lion}[
            kind.rule
        ]
    taken = inspect.signature(cls).parameters
    params = {key: value for key, value in params.items() if key in taken or key not in ("foreach", "fused")}
    return _construct(f"optimizer.params of {name}", cls, groups, params)


def _meant(name: str, own: Sequence[str], torchs: ModuleType, base: type) -> str:
    """The names nearest to one that is not there, of ours and of the classes of `torchs`."""
    classes = [key for key, value in vars(torchs).items() if isinstance(value, type) and issubclass(value, base)]
    near = _core.all_nearest(name, [*own, *classes])
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _construct(what: str, cls: Callable[..., Any], first: Any, params: dict[str, Any]) -> Any:
    params = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    try:
        return cls(first, **params)
    except TypeError as error:  # an unknown or missing argument
        raise ConfigError(f"[config] {what}: {error}") from None


def build_schedule(
    config: _core.Config, optimizer: Any, base: torch.optim.Optimizer | None, lr_scheduler: Any
) -> lr_schedules.Scheduler | None:
    """The schedule that engine.step() advances: the client's object, what its callable builds on `base`, the
    configured one, or None. `optimizer` is the client's argument."""
    if lr_scheduler is None:
        kind = config.scheduler.type
        if base is None or not kind:
            return None
        return _schedule_from_config(kind, _given(config.scheduler.params), base)
    if isinstance(lr_scheduler, LRScheduler) and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "[initialize] an lr_scheduler object needs the optimizer object it was made for: pass optimizer= too, or "
            "an lr_scheduler callable"
        )
    if not hasattr(lr_scheduler, "step"):
        if not callable(lr_scheduler):
            raise ConfigError(
                "[initialize] lr_scheduler must be a scheduler or a callable that builds one, got "
                f"{type(lr_scheduler).__name__}"
            )
        lr_scheduler = None if base is None else lr_scheduler(base)
    _check_of_optimizer(lr_scheduler, base)
    return lr_scheduler


def _check_of_optimizer(schedule: Any, base: torch.optim.Optimizer | None) -> None:
    """ConfigError for a schedule that moves the rates of another optimizer."""
    own = getattr(getattr(schedule, "optimizer", None), "param_groups", None)
    if base is None or not isinstance(own, list):
        return
    if {id(group) for group in own}.isdisjoint(map(id, base.param_groups)):
        raise ConfigError(
            f"[initialize] lr_scheduler is a {type(schedule).__name__} of another optimizer than the engine's, whose "
            "rates it would not move: build it over that one, or pass a callable that gets it"
        )


def _schedule_from_config(kind: str, params: dict[str, Any], base: torch.optim.Optimizer) -> Any:
    name = _core.schedule_name(kind)  # of DeepSpeed's five in any letter case, as in C++
    if name in lr_schedules.VALID_LR_SCHEDULES:
        found = getattr(lr_schedules, name)
    else:
        found = getattr(torch.optim.lr_scheduler, kind, None)
        if not isinstance(found, type):
            raise ConfigError(
                f"[config] scheduler.type {kind!r} is neither one of {', '.join(lr_schedules.VALID_LR_SCHEDULES)} nor "
                "a class of torch.optim.lr_scheduler"
                f"{_meant(kind, lr_schedules.VALID_LR_SCHEDULES, torch.optim.lr_scheduler, LRScheduler)}"
            )
    return _construct(f"scheduler.params of {kind}", found, base, params)


def momentum_of(groups: Iterable[dict[str, Any]]) -> list[Any]:
    """Betas of Adam-likes, else momentum, one per param group, as they are now."""
    return [group.get("betas", group.get("momentum", 0.0)) for group in groups]


def params_of(groups: Iterable[dict[str, Any]]) -> list[torch.Tensor]:
    """All tensors of param groups, in order."""
    return [param for group in groups for param in group["params"]]
