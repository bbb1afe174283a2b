"""deepspeed.runtime.sequence_parallel.parallel_state_sp: the groups that initialize_sequence_parallel() made last, for
callers that ask a module, or pass it as `mpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tessera.sequence as sequence
import torch.distributed as torch_dist

from deepspeed import _comm as dist  # noqa: F401
from deepspeed import _lazy
from deepspeed._mpu import Mpu

_made: list[Any] = [None, None]  # the world that they are of, and an Mpu


def __getattr__(name: str) -> Any:
    return _lazy.attribute(__name__, name)


def initialize_sequence_parallel(sequence_parallel_size: int, **sizes: int) -> Any:
    """Ranks that follow one another share a sequence. Returns the groups. Collective over all processes."""
    made = Mpu(sequence.make_groups(sequence_parallel_size, **sizes))
    _made[:] = [torch_dist.group.WORLD, made]
    return made


def current() -> Any:
    if _made[1] is None or _made[0] is not torch_dist.group.WORLD:
        raise AssertionError("[parallel_state_sp] call initialize_sequence_parallel(ranks of a sequence) first")
    return _made[1]


def _of_current(name: str) -> Callable[[], Any]:
    def get() -> Any:
        return getattr(current(), name)()

    get.__name__ = get.__qualname__ = name
    return get


get_sequence_parallel_group = _of_current("get_sequence_parallel_group")
get_sequence_parallel_rank = _of_current("get_sequence_parallel_rank")
get_sequence_parallel_world_size = _of_current("get_sequence_parallel_world_size")
get_sequence_data_parallel_group = _of_current("get_sequence_data_parallel_group")
get_sequence_data_parallel_rank = _of_current("get_sequence_data_parallel_rank")
get_sequence_data_parallel_world_size = _of_current("get_sequence_data_parallel_world_size")
get_data_parallel_group = _of_current("get_data_parallel_group")
get_data_parallel_rank = _of_current("get_data_parallel_rank")
get_data_parallel_world_size = _of_current("get_data_parallel_world_size")
# "Model parallel" is the one axis beside the data-parallel one.
get_model_parallel_group = get_sequence_parallel_group
get_model_parallel_rank = get_sequence_parallel_rank
get_model_parallel_world_size = get_sequence_parallel_world_size
