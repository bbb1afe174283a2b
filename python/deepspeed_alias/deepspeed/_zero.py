"""deepspeed.zero: Tessera's, with parameters that have the attributes old callers read."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from tessera.errors import ConfigError
from tessera.optim.engines import is_tested
from tessera.zero.engines import suspended
from torch import nn

import tessera
from deepspeed import _params
from deepspeed._config import read
from tessera import distributed


class ZeRORuntimeException(Exception):
    """DeepSpeed raises this where an optimizer or a checkpoint does not fit."""


class ZeroParamType(enum.Enum):
    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class Init(tessera.zero.Init):
    """tessera.zero.Init; creates the process group where there is none, as DeepSpeed does. `config` is the old name of
    `config_dict_or_path`; `mem_efficient_linear` is not read. The ranks: the first that is given of the groups, else
    the data-parallel ones of `mpu`, else all processes."""

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: bool = True,
    ) -> None:
        if not enabled:
            super().__init__(enabled=False)
            return
        distributed.init_distributed()
        refused = {
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
            "param_swapper": param_swapper is not None,
        }
        if any(refused.values()):
            names = ", ".join(name for name, value in refused.items() if value)
            raise NotImplementedError(f"[zero.Init] not served by this version: {names}")
        if config_dict_or_path is not None and config is not None:
            raise ConfigError("[zero.Init] config is the old name of config_dict_or_path; pass one of them")
        group = data_parallel_group or zero_param_parallel_group or sequence_data_parallel_group
        if group is None and mpu is not None:
            group = mpu.get_data_parallel_group()
        super().__init__(
            module,
            read(config if config_dict_or_path is None else config_dict_or_path),
            dtype=dtype,
            group=group,
            remote_device=remote_device,
            pin_memory=pin_memory,
            tensor_overrides=tensor_overrides,
        )

    def _partition(self, module: nn.Module) -> None:
        super()._partition(module)
        _params.adopt(p for p in dict.values(module._parameters) if p is not None and is_held(p))


class MiCS_Init(Init):
    """Init, for groups of zero_optimization.mics_shard_size ranks (of the configuration), each with a whole model."""

    def __init__(
        self,
        module: Any = None,
        data_parallel_group: Any = None,
        sequence_data_parallel_group: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, sequence_data_parallel_group or data_parallel_group, *args, **kwargs)


DEFAULT_LEAF_MODULE_CLASSES = list(tessera.zero.DEFAULT_LEAF_MODULE_CLASSES)
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


class _Regions(threading.local):
    """The GatheredParameters that this thread is in."""

    def __init__(self) -> None:
        self.open: list[GatheredParameters] = []


_regions = _Regions()


class GatheredParameters(tessera.zero.GatheredParameters):
    """tessera.zero.GatheredParameters."""

    def __enter__(self) -> None:
        _params.settle(self.params)
        super().__enter__()
        _regions.open.append(self)

    def __exit__(self, *error: Any) -> None:
        if self in _regions.open:
            _regions.open.remove(self)
        super().__exit__(*error)


@contextlib.contextmanager
def writable(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Makes partitioned ones of `params` whole inside the `with`, where they take the first rank's values afterwards,
    also in regions for reading. Collective."""
    written = {id(param) for region in _regions.open if region.modifier_rank is not None for param in region.params}
    with contextlib.ExitStack() as stack:
        for region in _regions.open:
            if region.modifier_rank is None:
                stack.enter_context(region.suspended())
        others = [param for param in params if id(param) not in written]
        stack.enter_context(tessera.zero.GatheredParameters(others, modifier_rank=0))
        yield


def is_held(param: torch.Tensor) -> bool:
    return tessera.zero.partition_info(param) is not None


def is_zero_param(parameter: Any) -> bool:
    return isinstance(parameter, _params.DsParameter)


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    return is_tested(optimizer)


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """The module inside an engine, with all parameters whole. Collective."""
    module = getattr(model, "module", model)
    with tessera.zero.GatheredParameters(module.parameters()):
        yield module


class DeepSpeedZeRoOffload:
    """What `optimizer.parameter_offload` is in stage 3. The hooks around modules are the core's own and harmless where
    parameters are whole, so there is nothing that a caller has to take off and put back."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def setup_zero_stage3_hooks(self) -> None:
        """Does nothing: the hooks stay where they are."""

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        """Does nothing: the module is hooked already."""

    def empty_partition_cache(self) -> None:
        """Does nothing: no parameter stays whole between two modules."""


# ---- what callers that build models inside zero.Init take of torch, before it changes there

_orig_torch_tensor = torch.tensor
_orig_torch_empty = torch.empty
_orig_torch_zeros = torch.zeros
_orig_torch_ones = torch.ones
_orig_torch_full = torch.full
_orig_torch_arange = torch.arange
_orig_torch_eye = torch.eye
_orig_torch_randn = torch.randn
_orig_torch_rand = torch.rand
_orig_torch_linspace = torch.linspace


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype) -> Any:
    """`fn` (torch.arange, torch.empty, ...) with its floating results in `target_fp_dtype`, on the accelerator's device
    where none is named."""
    from deepspeed._accelerator import get_accelerator

    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None:
            kwargs["device"] = torch.device(get_accelerator().current_device_name())
        tensor = fn(*args, **kwargs)
        return tensor.to(target_fp_dtype) if tensor.is_floating_point() else tensor

    return wrapped


class InsertPostInitMethodToModuleSubClasses(Init):
    """The base of DeepSpeed's zero.Init; here the same class."""


def shutdown_init_context() -> None:
    """Suspends a zero.Init that is open, until restore_init_context()."""
    _suspended.append(contextlib.ExitStack())
    _suspended[-1].enter_context(suspended())


def restore_init_context() -> None:
    if _suspended:
        _suspended.pop().close()


_suspended: list[contextlib.ExitStack] = []
