"""deepspeed.elasticity, over the section of tessera.Config.

Batch, numbers of ranks and micro-batch are DeepSpeed 0.19.6's, of which these differ on purpose:
- A world_size that the batch does not fit is an error. There version 0.2 makes up another batch for this world alone,
  so that a job that was to keep its batch trains with another.
- With model_parallel_size > 1 numbers are checked as data-parallel ranks. There world_size is read both as ranks and
  as devices, which refuses worlds that fit (a single node), and a micro-batch from WORLD_SIZE may not divide the share.
- No number of ranks fits: an error. There an empty list, a TypeError, or a batch for this world alone.
- max_gpus below one node is an error. There it is no limit at all.
- Without world_size and return_microbatch the environment is not asked. There version 0.2 wants WORLD_SIZE, and one
  that does not fit changes the batch.
- max_train_batch_size and micro_batch_sizes have the defaults of their keys. There leaving one out is an error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from tessera.errors import ConfigError

import tessera
from tessera import _core

_BY_NODES = 0.2  # the version
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class ElasticityError(ConfigError):
    """What an elastic configuration asks for does not exist."""


class ElasticityConfigError(ElasticityError):
    """The section itself is wrong or missing."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The batch does not fit this number of devices."""


def elastic_error(error: ConfigError) -> ElasticityError | None:
    """`error` as DeepSpeed's, where it is of this section."""
    kinds = {problem.kind for problem in error.problems if problem.path.split(".")[0] == "elasticity"}
    if not kinds:
        return None
    return (ElasticityIncompatibleWorldSize if "ranks" in kinds else ElasticityConfigError)(str(error))


@contextlib.contextmanager
def _elastic_errors() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise elastic_error(error) or error from None


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """`elasticity.enabled` of a configuration."""
    return bool((ds_config.get("elasticity") or {}).get("enabled", False))


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str | None = None,
    world_size: int = 0,
    return_microbatch: bool = False,
) -> Any:
    """Returns (train batch size, numbers of data-parallel ranks that it fits); with a `world_size` (> 0) of ranks also
    the largest micro-batch size that fits there. With `return_microbatch` alone, the size for the devices that
    WORLD_SIZE or another launcher's variable says; else the result depends on the arguments alone, so that a scheduler
    may call it, too.

    `target_deepspeed_version` is accepted and changes nothing. ElasticityConfigError for a wrong section, one that is
    off or missing, and where no launcher says the ranks; ElasticityIncompatibleWorldSize where the batch does not fit
    the ranks."""
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError("[elasticity] the configuration has no section elasticity that is enabled")
    with _elastic_errors():
        config = tessera.Config.from_dict({key: ds_config[key] for key in ("elasticity", *_BATCH) if key in ds_config})
        batch, valid = config.elastic_batch()
        if world_size <= 0 and not return_microbatch:
            return batch, valid
        section = config.elasticity
        ranks = world_size if world_size > 0 else _world_size() // section.model_parallel_size
        fitting = config.elastic_micro_batches(ranks)
    # DeepSpeed takes the preference for this one as well, but only of what the environment says.
    first = world_size <= 0 and section.version == _BY_NODES and not section.prefer_larger_batch
    return batch, valid, fitting[0] if first else max(fitting)


def _world_size() -> int:
    """What a launcher has said, srun and mpirun too: a scheduler, which is no rank, sets WORLD_SIZE alone."""
    try:
        launch = _core.read_launch(0, -1, True, False, 0)
    except ConfigError as error:
        raise ElasticityConfigError(str(error)) from None
    if launch.size == 1 and not os.environ.get("WORLD_SIZE"):
        raise ElasticityConfigError(
            "[elasticity] the micro-batch size depends on the number of ranks, and no launcher says that there are "
            "several: give world_size, or set WORLD_SIZE in the environment"
        )
    return launch.size
