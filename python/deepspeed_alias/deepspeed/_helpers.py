"""More small helpers that programs import from DeepSpeed: of values, lists, names and groups."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tessera.engine.front import values_of_all
from tessera.errors import ConfigError
from torch import nn

from deepspeed._lazy import NotServed
from deepspeed._small import is_moe_param
from tessera import _core


@dataclasses.dataclass
class fragment_address:
    """Where a parameter lies in a rank's flat master. Every file of optimizer states that DeepSpeed writes has such
    objects."""

    numel: int
    start: int


class DeprecatedException(Exception):
    """DeepSpeed raises this for what it has given up."""


class DummyOptim:
    """Parameters as a param group, for stage 3 without an optimizer."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


noop_context = contextlib.nullcontext

# ---- experts of others


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """DeepSpeed's own layers, which nothing here can build."""
    return False, 0


def split_params_into_shared_and_expert_params(params: Iterable[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    found = list(params)
    return [p for p in found if not is_moe_param(p)], [p for p in found if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(group: Iterable[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    shared, experts = split_params_into_shared_and_expert_params(p for p in group if p.grad is not None)
    return [p.grad for p in shared], [p.grad for p in experts]


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    return bool(param_group.get("moe", False))


def split_params_into_different_moe_groups_for_optimizer(param_groups: Any, max_group_size: float = 0) -> list[Any]:
    """The groups as a list, of a model without experts of DeepSpeed's kind."""
    if isinstance(param_groups, dict):
        param_groups = [param_groups]
    if not isinstance(param_groups, (list, tuple)):
        raise ConfigError(f"[moe] param groups must be a dict, a list or a tuple, got {type(param_groups).__name__}")
    for group in param_groups:
        group["params"] = list(group["params"])
        if any(is_moe_param(param) for param in group["params"]):
            raise NotServed(
                "[moe] a parameter has `allreduce` False, as experts of DeepSpeed's MoE layers, which are not served; "
                "leaf modules (zero_optimization.leaf_module) train other MoE models"
            )
    return list(param_groups)


# ---- lists and values


def prefix_sum_inc(weights: Iterable[float]) -> list[float]:
    total, sums = 0.0, []
    for weight in weights:
        total += weight
        sums.append(total)
    return [int(x) if float(x).is_integer() else x for x in sums]


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Returns where parts begin, and the end of the last one."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    return [0, *itertools.accumulate(_core.part_sizes(num_items, num_parts))]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Does partition_uniform()'s work with the largest sum of a part as small as it can be."""
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    return list(_core.split_weights([float(weight) for weight in weights], num_parts))


def get_only_unique_item(items: Iterable[Any]) -> Any:
    found = set(items)
    if len(found) != 1:
        raise RuntimeError(f"expected one value, got {found}")
    return found.pop()


def has_inf_or_nan(x: torch.Tensor) -> torch.Tensor:
    values = x._values() if x.is_sparse else x
    return torch.logical_not(torch.isfinite(values).all())


def is_invalid_grad_norm(norm: Any) -> bool:
    value = torch.as_tensor(norm)
    return bool((~torch.isfinite(value) | (value < 0)).any())


def get_tensor_bytes(item: Any) -> int:
    if isinstance(item, torch.Tensor):
        return item.numel() * item.element_size()
    if isinstance(item, (list, tuple, dict)):
        return sum(map(get_tensor_bytes, item.values() if isinstance(item, dict) else item))
    return 0


def get_global_norm_of_tensors(
    input_tensors: Iterable[torch.Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> float:
    """The norm of tensors of this rank, or of those of the tensor-parallel ranks of `mpu` together."""
    if moe_ep_group is not None:
        raise NotServed("[get_global_norm_of_tensors] moe_ep_group: groups of experts are not served")
    norms = [tensor.detach().float().norm(norm_type) for tensor in input_tensors]
    total = torch.stack(norms).norm(norm_type) if norms else torch.zeros(())
    group = bwc_tensor_model_parallel_group(mpu)
    if group is not None and dist.get_world_size(group) > 1:
        largest = norm_type == math.inf
        total = total if largest else total**norm_type
        dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group)
        total = total if largest else total ** (1 / norm_type)
    return total.item()


def clip_tensors_by_global_norm(
    input_tensors: Sequence[torch.Tensor],
    max_norm: float = 1.0,
    global_norm: float | None = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> float:
    """Scales them in place; returns the norm that they had."""
    norm = get_global_norm_of_tensors(input_tensors, mpu=mpu) if global_norm is None else global_norm
    if max_norm / (norm + eps) < 1:
        for tensor in input_tensors:
            tensor.detach().mul_(max_norm / (norm + eps))
    return norm


def is_builtin_type(obj: object) -> bool:
    return type(obj).__module__ == "builtins"


def isinstance_namedtuple(obj: object) -> bool:
    return isinstance(obj, tuple) and hasattr(obj, "_fields")


def apply_to_tensors_only(function: Callable[[Any], Any], value: Any, warning_msg_fn: Any = None) -> Any:
    """`value` with function(tensor) in place of each tensor, dicts changed in place."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        made = [apply_to_tensors_only(function, item) for item in value]
        return type(value)(*made) if isinstance_namedtuple(value) else type(value)(made)
    if isinstance(value, dict):
        for key in value:
            value[key] = apply_to_tensors_only(function, value[key])
    return value


# ---- names


def recursive_getattr(model: Any, module_name: str) -> Any:
    for name in module_name.split("."):
        model = getattr(model, name)
    return model


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


def parse_range(rng: str) -> list[int]:
    """ "2-4" is [2, 3, 4], "2" is [2]."""
    first, _, last = rng.partition("-")
    low, high = int(first), int(last or first)
    if low > high:
        raise ConfigError(f"[numa] the range '{rng}' ends before it begins")
    return list(range(low, high + 1))


def parse_range_list(range_str: str) -> list[int]:
    """ "0,2-4" is [0, 2, 3, 4]; numbers must grow."""
    found = [number for part in range_str.split(",") for number in parse_range(part)]
    if found != sorted(set(found)):
        raise ConfigError(f"[numa] the numbers of '{range_str}' do not grow")
    return found


# ---- the same on all ranks


def get_lst_from_rank0(lst: list[int]) -> list[int]:
    """Rank 0's, which may be of another length. Collective."""
    first: list[int] = values_of_all([int(number) for number in lst])[0]
    return first


def assert_ints_same_as_other_ranks(ints: list[int]) -> None:
    """Compared with the first rank's. Collective."""
    first = get_lst_from_rank0(ints)
    if list(ints) != first:
        raise RuntimeError(f"rank {dist.get_rank()} has {ints}, the first rank {first}")


def assert_lst_len_same_as_other_ranks(lst: Sequence[Any]) -> None:
    assert_ints_same_as_other_ranks([len(lst)])


# ---- mpu objects: the first of their getters that is there


def _first(mpu: Any, names: Iterable[str], without: Any) -> Any:
    found: Iterator[Any] = (getattr(mpu, name)() for name in names if hasattr(mpu, name))
    return without if mpu is None else next(found, without)


def _tensor(what: str) -> tuple[str, ...]:
    return tuple(f"get_{kind}_parallel_{what}" for kind in ("tensor_model", "slice", "model"))


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    return _first(mpu, _tensor("rank"), 0)


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    return _first(mpu, _tensor("world_size"), 1)


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    return _first(mpu, _tensor("group"), None)


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    return _first(mpu, ("get_pipeline_model_parallel_world_size", "get_pipe_parallel_world_size"), 1)


def bwc_pipeline_parallel_group(mpu: Any = None) -> Any:
    return _first(mpu, ("get_pipeline_model_parallel_group", "get_pipe_parallel_group"), None)


# ---- torch


def is_functorch_transforming() -> bool:
    """Whether a transformation of torch.func is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def register_grad_hook(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Registers a hook that is called when the parameter's gradient is complete."""
    return param.register_post_accumulate_grad_hook(hook)


def jit_script_compat(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn)


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """The mean without that share of the smallest and of the largest values."""
    if not 0.0 <= trim_percent <= 1.0:
        raise ConfigError(f"[timer] trim_percent must be between 0 and 1, got {trim_percent}")
    cut = int(len(data) * trim_percent)
    kept = sorted(data)[cut : max(cut + 1, len(data) - cut)] if data else []
    return sum(kept) / len(kept) if kept else 0.0
