"""What a pipeline refuses before it is built."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tessera import _core
from tessera.errors import ConfigError
from tessera.pipeline._module import PipelineModule


def check(model: Any, config: _core.Config, group: Any) -> None:
    if not isinstance(model, PipelineModule):
        raise ConfigError(f"[pipeline] the model must be a PipelineModule, got {type(model).__name__}")
    if group is not None:
        raise ConfigError("[pipeline] a pipeline lies over all processes; leave out mpu and group")
    if config.placements.shards_params and model.num_stages > 1:
        raise NotImplementedError(
            "[pipeline] zero_optimization.stage 3 is not served inside pipeline stages: every micro-batch would "
            "gather the "
            "stage's parameters again; use stage 1 or 2, and more pipeline stages"
        )
    if not config.get("managed_gradient_accumulation"):
        raise ConfigError(
            "[pipeline] managed_gradient_accumulation must be true: train_batch() counts its micro-batches"
        )


def check_alike(model: PipelineModule, config: _core.Config) -> None:
    """What every stage must have been told the same."""
    if model.num_stages == 1:
        return
    mine = {
        "num_stages": model.num_stages,
        "num_chunks": model.num_chunks,
        "bounds of the parts": model.bounds,
        "gradient_accumulation_steps": config.get("gradient_accumulation_steps"),
        "train_batch_size": config.get("train_batch_size"),
        "train_micro_batch_size_per_gpu": config.get("train_micro_batch_size_per_gpu"),
        "pipeline.schedule": config.get("pipeline.schedule"),
        "gradient_clipping": config.get("gradient_clipping"),
    }
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, other in enumerate(everyone):
        for key, value in mine.items():
            if other[key] != value:
                raise ConfigError(
                    f"[pipeline] {key} is {value} on rank {dist.get_rank()} and {other[key]} on rank {rank}"
                )


def rounds_at_random(config: _core.Config) -> bool:
    low = config.get("bf16.bf16_master_weights_and_grads") or config.get("bf16.bf16_optimizer_states")
    return bool(low) and config.get("tessera.rounding") != "nearest"
