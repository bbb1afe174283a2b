"""The classes that callers compare engine.optimizer with. All are tessera.Optimizer; which one says the stage."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tessera.errors import ConfigError
from torch import nn

import tessera
from deepspeed import _ops
from deepspeed._lazy import NotServed
from deepspeed._zero import DeepSpeedZeRoOffload, ZeRORuntimeException
from tessera import _core, optim
from tessera.zero import get_leaf_modules

MEMORY_OPT_ALLREDUCE_SIZE = 500_000_000
DeepSpeedOptimizerCallable = Callable[[Any], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], Any]


class DeepSpeedOptimizer(tessera.Optimizer):
    """The base of all that follow."""

    @property
    def _owner(self) -> Any:
        return self._live_engine()

    @property
    def _settings(self) -> tessera.Config:
        return self._owner.config

    @property
    def cur_scale(self) -> float:
        return self.loss_scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        self.loss_scale = scale

    @property
    def torch_autocast_gradscaler(self) -> Any:
        """The scaler where torch_autocast runs in fp16, else None."""
        in_fp16 = self._settings.torch_autocast.enabled and self._settings.torch_autocast.dtype == torch.float16
        return self.loss_scaler if in_fp16 else None

    @property
    def clip_grad(self) -> float:
        return self._settings.gradient_clipping

    def refresh_fp32_params(self) -> None:
        """Masters from the weights as they are now."""
        self._owner.core.adopt_params()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, **kwargs: Any) -> None:
        self._owner.backward(loss, retain_graph=retain_graph, **kwargs)

    def _flat_masters(self) -> list[torch.Tensor]:
        """This rank's masters of each param group in fp32, one after the other. Copies."""
        engine = self._owner
        flat = []
        for group in range(len(engine.core.groups())):
            views = [
                engine.core.local_view(number, _core.Quantity.Master)
                for number, spec in enumerate(engine.core.params())
                if spec.group == group
            ]
            parts = [view.detach().reshape(-1).float() for view in views if view is not None]
            flat.append(torch.cat(parts) if parts else torch.empty(0))
        return flat


class ZeROOptimizer(DeepSpeedOptimizer):
    """Stages 1 to 3."""

    nccl_start_alignment_factor = 2

    @property
    def cpu_offload(self) -> bool:
        return self._settings.zero_optimization.offload_optimizer.device != "none"

    @property
    def partition_gradients(self) -> bool:
        return self._settings.zero_optimization.stage >= 2

    def get_param_id(self, param: torch.Tensor) -> int:
        """The number of a parameter that is trained."""
        number = self._owner.param_number(param)
        if number is None:
            raise ConfigError("[optimizer] this is no parameter of the engine's module")
        return number

    @property
    def accumulated_grads_in_cpu(self) -> dict[int, torch.Tensor]:
        """This rank's part of the gradients that are accumulated for a step of several backwards, with optimizer
        offload, by the parameter's number. (One backward a step accumulates nothing.)"""
        engine = self._owner
        several = engine.gradient_accumulation_steps() > 1 or not engine.is_gradient_accumulation_boundary()
        if not (several and self.cpu_offload):
            return {}
        views = {number: engine.core.local_view(number, _core.Quantity.Gradient) for number in engine.trained_numbers()}
        return {number: view.detach().cpu() for number, view in views.items() if view is not None}


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Stages 1 and 2."""

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        return self._flat_masters()


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """Stage 3."""

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        return self._flat_masters()

    @functools.cached_property
    def parameter_offload(self) -> DeepSpeedZeRoOffload:
        return DeepSpeedZeRoOffload(self._owner.module)

    @property
    def leaf_parameters(self) -> dict[nn.Module, list[nn.Parameter]]:
        """The parameters of each leaf module."""
        return {module: list(module.parameters()) for module in get_leaf_modules(self._owner.module)}


class FP16_Optimizer(DeepSpeedOptimizer):
    """Stage 0 with fp16 or bf16 parameters and fp32 masters."""

    @property
    def low_precision_dtype(self) -> torch.dtype:
        return torch.float16 if self._settings.fp16.enabled else torch.bfloat16

    @property
    def fp32_groups_flat(self) -> list[torch.Tensor]:
        return self._flat_masters()


class BF16_Optimizer(FP16_Optimizer):
    """FP16_Optimizer in bf16."""


class FP16_UnfusedOptimizer(FP16_Optimizer):
    """FP16_Optimizer for other optimizers than FusedAdam; Tessera has one way of updating."""

    @property
    def fp32_groups(self) -> list[list[torch.Tensor]]:
        """The masters of each param group, in their parameters' shapes. Views where they are fp32, else copies."""
        engine = self._owner
        found: list[list[torch.Tensor]] = [[] for _ in engine.core.groups()]
        for number, spec in enumerate(engine.core.params()):
            if spec.group >= 0:
                found[spec.group].append(engine.core.local_view(number, _core.Quantity.Master).float())
        return found


class _UnfusedBF16(BF16_Optimizer, FP16_UnfusedOptimizer):
    """DeepSpeed's class in bf16 beside FusedAdam's: unfused, by one class or the other."""


def class_for(engine: tessera.Engine) -> type[DeepSpeedOptimizer]:
    stage = engine.config.zero_optimization.stage
    if stage == 3:
        return DeepSpeedZeroOptimizer_Stage3
    if stage > 0:
        return DeepSpeedZeroOptimizer
    fused = isinstance(engine.basic_optimizer, _ops.FusedAdam)
    if engine.config.bf16.enabled:
        return BF16_Optimizer if fused else _UnfusedBF16
    return FP16_Optimizer if fused else FP16_UnfusedOptimizer


# The class that the configuration builds -> DeepSpeed's names of it: without optimizer offload, and with it.
_NAMES: dict[type, tuple[type, type]] = {
    optim.FusedAdam: (_ops.FusedAdam, _ops.DeepSpeedCPUAdam),
    optim.Lion: (_ops.FusedLion, _ops.DeepSpeedCPULion),
    optim.Lamb: (_ops.FusedLamb, _ops.FusedLamb),
    optim.Muon: (_ops.MuonWithAuxAdam, _ops.MuonWithAuxAdam),
}


def checked(settings: tessera.Config, client: Any, base: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An engine's base optimizer, of DeepSpeed's class where the configuration has built it. Errors of offload: for a
    client's that is not made for the CPU, and for one that 16-bit masters do not go with."""
    away = settings.zero_optimization.offload_optimizer.device != "none"
    low_states = settings.bf16.enabled and settings.bf16.bf16_optimizer_states
    if client is None:
        if type(base) in _NAMES:
            base.__class__ = _NAMES[type(base)][away]
            vars(base)["fp32_optimizer_states"] = not low_states
    elif away and settings.zero_force_ds_cpu_optimizer and not isinstance(base, _ON_CPU):
        raise ZeRORuntimeException(
            f"[initialize] {type(base).__name__} of your own with zero_optimization.offload_optimizer: use "
            "deepspeed.ops.adam.DeepSpeedCPUAdam or an optimizer of the configuration, or set "
            '"zero_force_ds_cpu_optimizer": false'
        )
    if away:
        _check_masters(settings, base, low_states)
    return base


_ON_CPU = (_ops.DeepSpeedCPUAdam, _ops.DeepSpeedCPULion)


def _check_masters(settings: tessera.Config, base: torch.optim.Optimizer, low_states: bool) -> None:
    """Checks settings of optimizer offload."""
    bf16 = settings.bf16.enabled and settings.bf16.bf16_master_weights_and_grads
    fp16 = settings.fp16.enabled and settings.fp16.fp16_master_weights_and_grads
    if not (bf16 or fp16):
        return
    key = "bf16.bf16_master_weights_and_grads" if bf16 else "fp16.fp16_master_weights_and_grads"
    if type(base) is not _ops.DeepSpeedCPUAdam:
        raise ConfigError(f"[initialize] {key} with offload needs DeepSpeedCPUAdam, got {type(base).__name__}")
    if low_states and base.fp32_optimizer_states:
        raise ConfigError(
            "[initialize] bf16.bf16_optimizer_states with offload needs DeepSpeedCPUAdam(fp32_optimizer_states=False)"
        )
    if not low_states and not base.fp32_optimizer_states:
        raise NotServed(
            f"[initialize] DeepSpeedCPUAdam(fp32_optimizer_states=False) beside {key} alone is not served; "
            "bf16.bf16_optimizer_states keeps moments in bf16"
        )
