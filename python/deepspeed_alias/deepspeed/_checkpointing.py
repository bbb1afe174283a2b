"""deepspeed.checkpointing: tessera.recompute, set up once for the process."""

from __future__ import annotations

from typing import Any

from tessera.recompute import RandomStates, Recompute

from deepspeed import _groups
from deepspeed._accelerator import get_accelerator
from tessera import _core

_MODEL_PARALLEL = "model-parallel-rng"
_MODEL_PARALLEL_SEED = 2718  # between the default generator's seed and that of the first tensor-parallel rank


class RngTracker(RandomStates):
    """States of random generators by name; fork(name) draws from one of them."""

    def __init__(self) -> None:
        super().__init__(get_accelerator().device_name())

    @property
    def states_(self) -> dict[str, Any]:
        return self.states

    @property
    def seeds_(self) -> set[int]:
        return self.seeds

    def reset(self) -> None:
        self.clear()

    def get_states(self) -> dict[str, Any]:
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = dict(states)

    def fork(self, name: str = _MODEL_PARALLEL) -> Any:
        return super().fork(name)


_tracker = RngTracker()
_call = Recompute(random=_tracker)
_configured = False


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Sets what checkpoint() does from now on. Arguments win over the section activation_checkpointing of
    `deepspeed_config`. partition_activations needs the tensor-parallel ranks: those of `mpu_`, or of the engine that
    was built last."""
    global _call, _configured
    section: Any = None
    if deepspeed_config is not None:
        from tessera.engine.front import load_config

        from deepspeed._config import read

        section = load_config(read(deepspeed_config)).activation_checkpointing

    def chosen(value: bool | None, key: str) -> bool:
        return bool(getattr(section, key, False) if value is None else value)

    _call = Recompute(
        offload=chosen(checkpoint_in_cpu, "cpu_checkpointing"),
        slices=_tensor_parallel_ranks(mpu_) if chosen(partition_activations, "partition_activations") else None,
        synchronize=chosen(synchronize, "synchronize_checkpoint_boundary"),
        named=chosen(profile, "profile"),
        random=_tracker,
    )
    _configured = True


def _tensor_parallel_ranks(mpu: Any) -> _core.Group | None:
    for getter in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        if hasattr(mpu, getter):
            from tessera.engine.front import core_group

            return core_group(getattr(mpu, getter)())
    mesh = _groups._mesh()
    return None if mesh is None else mesh.group(_core.Axis.Tp)


def is_configured() -> bool:
    return _configured


def reset() -> None:
    """Does nothing: checkpoints keep nothing from one iteration to the next."""


def set_num_layers(nlayers: int) -> None:
    """Does nothing: no memory is set aside for activations, so the number of layers does not matter."""


def checkpoint(function: Any, *args: Any) -> Any:
    """function(*args); what the backward needs is computed again there."""
    return _call(function, *args)


non_reentrant_checkpoint = checkpoint


class CheckpointFunction:
    """checkpoint() under the name of an autograd function."""

    @staticmethod
    def apply(function: Any, *args: Any) -> Any:
        return checkpoint(function, *args)


def get_cuda_rng_tracker() -> RngTracker:
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """The default generator alike on all tensor-parallel ranks, the tracker's different on each."""
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add(_MODEL_PARALLEL, seed + _MODEL_PARALLEL_SEED + _groups._get_model_parallel_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    _tracker.states.pop(_MODEL_PARALLEL, None)
    _tracker.add(_MODEL_PARALLEL, seed + _groups._get_model_parallel_rank())
