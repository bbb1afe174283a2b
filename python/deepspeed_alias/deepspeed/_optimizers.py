"""The classes that callers compare engine.optimizer with. All are tessera.Optimizer; which one says the stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tessera
from deepspeed._zero import DeepSpeedZeRoOffload
from tessera import _core
from tessera.zero import get_z3_leaf_modules

MEMORY_OPT_ALLREDUCE_SIZE = 500_000_000
DeepSpeedOptimizerCallable = Callable[[Any], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], Any]


class DeepSpeedOptimizer(tessera.Optimizer):
    """The base of all that follow."""

    @property
    def _owner(self) -> Any:
        return self._live_engine()

    @property
    def cur_scale(self) -> float:
        return self.loss_scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        self.loss_scale = scale

    @property
    def torch_autocast_gradscaler(self) -> Any:
        """The scaler where torch_autocast runs in fp16, else None."""
        engine = self._owner
        in_fp16 = engine.torch_autocast_enabled() and engine.torch_autocast_dtype() is torch.float16
        return self.loss_scaler if in_fp16 else None

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, **kwargs: Any) -> None:
        self._owner.backward(loss, retain_graph=retain_graph, **kwargs)

    def _flat_masters(self) -> list[torch.Tensor]:
        """Of each param group, this rank's masters in fp32, one after the other. Copies."""
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
    def accumulated_grads_in_cpu(self) -> dict[Any, Any]:
        """Gradients that optimizer offload keeps in host memory; there are none without it."""
        return {}


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

    @property
    def parameter_offload(self) -> DeepSpeedZeRoOffload:
        engine = self._owner
        if engine._parameter_offload is None:
            engine._parameter_offload = DeepSpeedZeRoOffload(engine.module)
        return engine._parameter_offload

    @property
    def leaf_parameters(self) -> dict[nn.Module, list[nn.Parameter]]:
        """The parameters of each leaf module."""
        return {module: list(module.parameters()) for module in get_z3_leaf_modules(self._owner.module)}


class FP16_Optimizer(DeepSpeedOptimizer):
    """Stage 0 with fp16 or bf16 parameters and fp32 masters."""

    @property
    def fp32_groups_flat(self) -> list[torch.Tensor]:
        return self._flat_masters()


class BF16_Optimizer(FP16_Optimizer):
    """The same in bf16."""


class FP16_UnfusedOptimizer(FP16_Optimizer):
    """The same; Tessera has one way of updating."""


def class_for(engine: tessera.Engine) -> type[DeepSpeedOptimizer]:
    stage = engine.zero_optimization_stage()
    if stage == 3:
        return DeepSpeedZeroOptimizer_Stage3
    if stage > 0:
        return DeepSpeedZeroOptimizer
    return BF16_Optimizer if engine.bfloat16_enabled() else FP16_Optimizer
