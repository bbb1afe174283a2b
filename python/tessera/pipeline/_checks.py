"""Refuses what a pipeline cannot be built of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tessera import _core
from tessera.errors import ConfigError
from tessera.optim.engines import class_of, plain_values
from tessera.pipeline._grid import Everyone
from tessera.pipeline._module import PipelineModule


def check(model: Any, config: _core.Config, group: Any) -> None:
    if not isinstance(model, PipelineModule):
        raise ConfigError(f"[pipeline] the model must be a PipelineModule, got {type(model).__name__}")
    if group is not None:
        raise ConfigError("[pipeline] a pipeline lies over all processes; leave out the group")
    if config.placements.shards_params and model.num_stages > 1:
        raise NotImplementedError(
            "[pipeline] zero_optimization.stage 3 is not served inside pipeline stages: every micro-batch would "
            "gather the "
            "stage's parameters again; use stage 1 or 2, and more pipeline stages"
        )
    if not config.managed_gradient_accumulation:
        raise ConfigError(
            "[pipeline] managed_gradient_accumulation must be true: train_batch() counts its micro-batches"
        )


def check_alike(model: PipelineModule, config: _core.Config, everyone: Everyone) -> None:
    """Checks what all stages must have alike. Collective."""
    mine = {
        "num_stages": model.num_stages,
        "num_chunks": model.num_chunks,
        "bounds of the parts": model.bounds,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "train_batch_size": config.train_batch_size,
        "train_micro_batch_size_per_gpu": config.train_micro_batch_size_per_gpu,
        "pipeline.schedule": config.pipeline.schedule,
        "gradient_clipping": config.gradient_clipping,
    }
    for rank, other in enumerate(everyone.values(mine)):
        for key, value in mine.items():
            if other[key] != value:
                raise ConfigError(
                    f"[pipeline] {key} is {value} on rank {everyone.rank} and {other[key]} on rank {rank}"
                )


@dataclass(frozen=True)
class Optimizer:
    """The part of an optimizer that all stages must have alike."""

    kind: str
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, base: torch.optim.Optimizer | None) -> Optimizer | None:
        return None if base is None else cls(class_of(base), [plain_values(group) for group in base.param_groups])

    def plain(self) -> list[Any]:
        """The values as JSON can say them, which has no tuples."""
        return [self.kind, self.groups]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Optimizer:
        kind, groups = plain
        return cls(kind, [{k: tuple(v) if isinstance(v, list) else v for k, v in group.items()} for group in groups])


def check_optimizers(everyone: Sequence[Optimizer | None], name: Callable[[int], str]) -> None:
    """Checks the optimizers of all ranks, which `name` puts in words: a param group has one number and the same values
    on all of them, since a checkpoint has it once."""
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if first is None or other is None:
            if first is not other:
                with_one, without = (rank, 0) if first is None else (0, rank)
                raise ConfigError(
                    f"[pipeline] {name(without)} has no optimizer, {name(with_one)} has one; configure it, or pass a "
                    "callable (optimizer=torch.optim.AdamW), which serves a stage with nothing to train, too"
                )
            continue
        if first.kind != other.kind:
            raise ConfigError(
                f"[pipeline] the optimizer is a {first.kind} on {name(0)} and a {other.kind} on {name(rank)}"
            )
        if len(first.groups) != len(other.groups):
            raise ConfigError(
                f"[pipeline] the optimizer has {len(first.groups)} param groups on {name(0)} and {len(other.groups)} "
                f"on {name(rank)}; give all stages the same groups, with an empty list of params where one has none"
            )
        for number, (group, same) in enumerate(zip(first.groups, other.groups, strict=True)):
            for key in sorted(group.keys() | same.keys()):
                if group.get(key) != same.get(key):
                    raise ConfigError(
                        f"[pipeline] param group {number} has {key} {group.get(key)} on {name(0)} and {same.get(key)} "
                        f"on {name(rank)}; a group is of all stages: make another one, with an empty list of params "
                        "where a stage has none"
                    )


def check_ties(model: PipelineModule, config: _core.Config) -> None:
    low = config.bf16.bf16_master_weights_and_grads or config.bf16.bf16_optimizer_states
    tied = [stages for stages in model.tied_stages().values() if len(stages) > 1 and model.stage_id in stages]
    if tied and low and config.tessera.rounding != "nearest":
        raise NotImplementedError(
            "[pipeline] tied weights on several stages do not stay equal where updates round at random: set "
            '"tessera": {"rounding": "nearest"}, or leave bf16_master_weights_and_grads and bf16_optimizer_states'
        )
