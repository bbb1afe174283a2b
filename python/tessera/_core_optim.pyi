"""Types of the compiled module, continued: tessera/optim. At run time these names are in `tessera._core` only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from tessera._core import Engine

class Rule(Enum):
    Adam = ...
    Sgd = ...
    Lion = ...
    Adagrad = ...
    External = ...
    Lamb = ...
    Muon = ...
    Adafactor = ...

class GroupOptions:
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    bias_correction: bool
    momentum: float
    dampening: float
    nesterov: bool
    lr_decay: float
    initial_accumulator_value: float
    maximize: bool
    def __init__(self) -> None: ...

class OptimizerOptions:
    rule: Rule
    defaults: GroupOptions
    others: GroupOptions | None
    def __init__(self) -> None: ...

class Shards:
    def sizes(self, param: int, part: torch.Tensor) -> list[int]: ...

def options_of_type(type: str, adam_w_mode: bool = True) -> OptimizerOptions: ...
def group_values(rule: Rule, group: GroupOptions) -> dict[str, Any]: ...
def read_group(rule: Rule, values: Mapping[str, Any], group: GroupOptions) -> None: ...
def check_group(rule: Rule, group: GroupOptions, origin: str, number: int | None = None) -> None: ...
def torch_defaults(type: str) -> GroupOptions: ...
def shards_of(engine: Engine, optimizer: str) -> Shards: ...
def whole_states(rule: Rule, group: GroupOptions, sizes: Sequence[int]) -> list[tuple[str, list[int] | None]]: ...
def update_whole(
    rule: Rule,
    groups: Sequence[GroupOptions],
    group_of: Sequence[int],
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    states: Sequence[Sequence[torch.Tensor]],
    steps: Sequence[int],
    numbers: Sequence[int],
    shards: Shards | None,
) -> None: ...
def wrong_param(rule: Rule, on_cpu_only: bool, param: torch.Tensor) -> str: ...
def orthogonal(matrix: torch.Tensor, steps: int) -> torch.Tensor: ...
def is_muon_matrix(name: str, dims: int) -> bool: ...
def state_names(rule: Rule, groups: Sequence[GroupOptions]) -> list[str]: ...
def update_tensors(
    rule: Rule,
    group: GroupOptions,
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    states: Sequence[Sequence[torch.Tensor]],
    steps: Sequence[torch.Tensor],
    firsts: Sequence[int],
    stochastic: bool = False,
    seed: int = 0,
) -> None:
    """`states`: of each kind, those of all parameters; `steps`: tensors of one number each, which count."""

class WarmupLR:
    def __init__(self) -> None: ...
    warmup_min_lr: list[float]
    warmup_max_lr: list[float]
    warmup_num_steps: int
    warmup_type: str

class WarmupDecayLR:
    def __init__(self) -> None: ...
    total_num_steps: int
    warmup_min_lr: list[float]
    warmup_max_lr: list[float]
    warmup_num_steps: int
    warmup_type: str

class WarmupCosineLR:
    def __init__(self) -> None: ...
    total_num_steps: int
    warmup_min_ratio: float
    warmup_num_steps: int
    cos_min_ratio: float
    warmup_type: str

class OneCycle:
    def __init__(self) -> None: ...
    cycle_min_lr: list[float]
    cycle_max_lr: list[float]
    decay_lr_rate: float
    cycle_first_step_size: int
    cycle_second_step_size: int | None
    cycle_first_stair_count: int
    cycle_second_stair_count: int | None
    decay_step_size: int
    cycle_momentum: bool
    cycle_min_mom: list[float]
    cycle_max_mom: list[float]
    decay_mom_rate: float

class LRRangeTest:
    def __init__(self) -> None: ...
    lr_range_test_min_lr: list[float]
    lr_range_test_step_size: int
    lr_range_test_step_rate: float
    lr_range_test_staircase: bool

class ScheduleValues:
    lr: list[float]
    momentum: list[float]

def schedule_of(type: str, arguments: dict[str, Any]) -> Any: ...
def schedule_name(type: str) -> str: ...
def warn_of_betas(schedule: Any, has_betas: bool, optimizer: str) -> str: ...
def evaluate(options: Any, iteration: int, base_lrs: Sequence[float]) -> ScheduleValues: ...
