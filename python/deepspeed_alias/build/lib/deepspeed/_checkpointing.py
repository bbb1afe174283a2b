"""deepspeed.checkpointing: activation checkpointing by torch, with activations in host memory where asked, and with the
states of named random generators restored for the recomputation."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as _torch_checkpoint

from deepspeed import _groups
from deepspeed._accelerator import get_accelerator
from deepspeed._lazy import NotServed

_MODEL_PARALLEL = "model-parallel-rng"


@dataclasses.dataclass
class _Options:
    configured: bool = False
    cpu: bool = False
    synchronize: bool = False


_options = _Options()


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
    """For checkpoint() from now on. Arguments win over the section activation_checkpointing of `deepspeed_config`."""
    section: dict[str, Any] = {}
    if deepspeed_config is not None:
        from tessera._config import load_config

        section = load_config(deepspeed_config).to_dict()["activation_checkpointing"]

    def chosen(value: bool | None, key: str) -> bool:
        return bool(section.get(key, False) if value is None else value)

    if chosen(partition_activations, "partition_activations"):
        raise NotServed(
            "[checkpointing.configure] partition_activations (activation_checkpointing.partition_activations) is not "
            "served; checkpoint_in_cpu moves activations to host memory"
        )
    _options.configured = True
    _options.cpu = chosen(checkpoint_in_cpu, "cpu_checkpointing")
    _options.synchronize = chosen(synchronize, "synchronize_checkpoint_boundary")


def is_configured() -> bool:
    return _options.configured


def reset() -> None:
    """Nothing is kept from one iteration to the next."""


def set_num_layers(nlayers: int) -> None:
    """Memory for activations is not set aside, so their number does not matter."""


def checkpoint(function: Any, *args: Any) -> Any:
    """function(*args); what the backward needs is computed again there."""
    tracker = get_cuda_rng_tracker()

    def contexts() -> tuple[Any, Any]:
        states = tracker.get_states()
        return contextlib.nullcontext(), tracker.using(states)

    if _options.synchronize:
        get_accelerator().synchronize()
    on_cpu = torch.autograd.graph.save_on_cpu() if _options.cpu else contextlib.nullcontext()
    with on_cpu, torch.profiler.record_function("activation checkpoint"):
        return _torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


non_reentrant_checkpoint = checkpoint


class CheckpointFunction:
    """checkpoint() under the name of an autograd function."""

    @staticmethod
    def apply(function: Any, *args: Any) -> Any:
        return checkpoint(function, *args)


class RngTracker:
    """States of random generators by name; fork(name) draws from one of them."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        if seed in self.seeds_:
            raise Exception(f"seed {seed} already exists")
        if name in self.states_:
            raise Exception(f"rng state {name} already exists")
        self.seeds_.add(seed)
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.states_[name] = device.get_rng_state()
        device.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        if name not in self.states_:
            raise Exception(f"rng state {name} is not added")
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)

    @contextlib.contextmanager
    def using(self, states: dict[str, torch.Tensor]) -> Iterator[None]:
        """Inside they are these; afterwards what they were before."""
        before, self.states_ = self.states_, dict(states)
        try:
            yield
        finally:
            self.states_ = before


_tracker = RngTracker()


def get_cuda_rng_tracker() -> RngTracker:
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """The default generator alike on all tensor-parallel ranks, the tracker's different on each."""
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add(_MODEL_PARALLEL, seed + 2718 + _groups._get_model_parallel_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    _tracker.states_.pop(_MODEL_PARALLEL, None)
    _tracker.add(_MODEL_PARALLEL, seed + _groups._get_model_parallel_rank())
