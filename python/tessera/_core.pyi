"""Types of the compiled module. The contracts are in the headers of tessera/."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum
from typing import Any

import torch

torch_version: str
version: str

class OpStats:
    calls: int
    bytes: int

class CommStats:
    all_gather: OpStats
    reduce_scatter: OpStats
    all_reduce: OpStats
    broadcast: OpStats
    all_to_all: OpStats
    barrier: OpStats

class Group:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str: ...
    def barrier(self) -> None: ...
    def abort(self, reason: str) -> None: ...
    def stats(self) -> CommStats: ...
    def reset_stats(self) -> None: ...

def single_group() -> Group: ...
def thread_groups(size: int, timeout: timedelta = ...) -> list[Group]: ...
def c10d_group(name: str) -> Group: ...

class Axis(Enum):
    DpReplicate = ...
    DpShard = ...
    Sp = ...
    Tp = ...

class Mesh:
    def __init__(self, dp_shard: Group = ...) -> None: ...
    def set(self, axis: Axis, group: Group) -> Mesh: ...
    def group(self, axis: Axis) -> Group: ...
    def size(self, axis: Axis) -> int: ...
    def rank(self, axis: Axis) -> int: ...

class PrecisionPolicy:
    param: torch.dtype
    grad: torch.dtype
    master: torch.dtype
    skip_nonfinite: bool
    def __init__(self) -> None: ...
    @staticmethod
    def fp32() -> PrecisionPolicy: ...
    @staticmethod
    def bf16(check_overflow: bool = True) -> PrecisionPolicy: ...
    def master_is_param(self) -> bool: ...

class ZeroOptions:
    stage: int
    precision: PrecisionPolicy
    reduce_bucket_size: int
    min_unit_elements: int
    overlap: bool
    average: bool
    reduce_at_step: bool
    def __init__(self) -> None: ...

class Rule(Enum):
    Adam = ...
    Sgd = ...
    Lion = ...
    Adagrad = ...
    External = ...

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
    def __init__(self) -> None: ...

def options_of_type(type: str, adam_w_mode: bool = True) -> OptimizerOptions: ...
def state_names(rule: Rule, groups: Sequence[GroupOptions]) -> list[str]: ...
def update(
    rule: Rule,
    group: GroupOptions,
    step: int,
    master: torch.Tensor,
    grad: torch.Tensor,
    states: Sequence[torch.Tensor],
    grad_scale: float = 1.0,
) -> None: ...

class WarmupType(Enum):
    Log = ...
    Linear = ...

class WarmupLR:
    warmup_min_lr: list[float]
    warmup_max_lr: list[float]
    warmup_num_steps: int
    warmup_type: WarmupType

class WarmupDecayLR:
    total_num_steps: int
    warmup_min_lr: list[float]
    warmup_max_lr: list[float]
    warmup_num_steps: int
    warmup_type: WarmupType

class WarmupCosineLR:
    total_num_steps: int
    warmup_min_ratio: float
    warmup_num_steps: int
    cos_min_ratio: float
    warmup_type: WarmupType

class OneCycle:
    cycle_min_lr: float
    cycle_max_lr: float
    decay_lr_rate: float
    cycle_first_step_size: int
    cycle_second_step_size: int | None
    cycle_first_stair_count: int
    cycle_second_stair_count: int | None
    decay_step_size: int
    cycle_momentum: bool
    cycle_min_mom: float
    cycle_max_mom: float
    decay_mom_rate: float

class LRRangeTest:
    lr_range_test_min_lr: list[float]
    lr_range_test_step_size: int
    lr_range_test_step_rate: float
    lr_range_test_staircase: bool

class ScheduleValues:
    lr: list[float]
    momentum: list[float]

def evaluate(options: Any, iteration: int, base_lrs: Sequence[float]) -> ScheduleValues: ...

class OptimizerConfig:
    type: str
    @property
    def params(self) -> dict[str, Any]: ...

class SchedulerConfig:
    type: str
    @property
    def params(self) -> dict[str, Any]: ...

class Bf16Config:
    enabled: bool
    check_grad_overflow: bool

class Fp16Config:
    enabled: bool
    loss_scale: float

class TorchAutocastConfig:
    enabled: bool
    dtype: torch.dtype | None

class DataTypesConfig:
    grad_accum_dtype: torch.dtype | None
    param_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None

class TensorParallelConfig:
    autotp_size: int

class ZeroConfig:
    stage: int
    contiguous_gradients: bool
    reduce_scatter: bool
    reduce_bucket_size: int
    allgather_partitions: bool
    allgather_bucket_size: int
    overlap_comm: bool | None
    load_from_fp32_weights: bool
    ignore_unused_parameters: bool
    stage3_gather_16bit_weights_on_model_save: bool

class Batch:
    train_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int

class GradientOp(Enum):
    Mean = ...
    Sum = ...

class Config:
    warnings: list[str]
    given: dict[str, str]
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    gradient_clipping: float
    managed_gradient_accumulation: bool
    gradient_allreduce_op: GradientOp
    prescale_gradients: bool
    gradient_predivide_factor: float
    communication_data_type: torch.dtype | None
    bf16: Bf16Config
    fp16: Fp16Config
    torch_autocast: TorchAutocastConfig
    data_types: DataTypesConfig
    zero_optimization: ZeroConfig
    zero_allow_untested_optimizer: bool
    tensor_parallel: TensorParallelConfig
    data_parallel_size: int
    sequence_parallel_size: int
    steps_per_print: int | None
    wall_clock_breakdown: bool
    dataloader_drop_last: bool
    @staticmethod
    def from_file(path: str) -> Config: ...
    @staticmethod
    def from_json(text: str) -> Config: ...
    @staticmethod
    def from_dict(value: dict[str, Any]) -> Config: ...
    def resolve_batch(self, data_parallel_size: int) -> Batch: ...
    def describe(self, all: bool = True) -> str: ...

def check_served(config: Config) -> None: ...
def precision(config: Config) -> PrecisionPolicy: ...
def zero_options(config: Config) -> ZeroOptions: ...

class EngineOptions:
    zero: ZeroOptions
    rule: Rule
    gradient_accumulation_steps: int
    gradient_clipping: float
    managed_accumulation: bool
    def __init__(self) -> None: ...

class ParamSpec:
    def __init__(self, name: str, tensor: torch.Tensor, group: int, unit: str) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def tensor(self) -> torch.Tensor: ...
    @property
    def group(self) -> int: ...
    @property
    def unit(self) -> str: ...

class Quantity(Enum):
    Master = ...
    Gradient = ...
    State0 = ...
    State1 = ...

class Memory:
    params: int
    grads: int
    master: int
    states: int
    buckets: int

class Engine:
    def __init__(
        self, options: EngineOptions, mesh: Mesh, params: Sequence[ParamSpec], groups: Sequence[GroupOptions]
    ) -> None: ...
    def pre_forward(self) -> None: ...
    def post_forward(self, outputs: Sequence[torch.Tensor]) -> None: ...
    def abort_forward(self) -> None: ...
    def begin_backward(self, loss: torch.Tensor, scale_wrt_gas: bool = True) -> torch.Tensor: ...
    def end_backward(self, loss: torch.Tensor) -> torch.Tensor: ...
    def scale(self, loss: torch.Tensor) -> torch.Tensor: ...
    def step(self, external: Callable[[], None] | None = None) -> bool: ...
    def zero_grad(self) -> None: ...
    def is_gradient_accumulation_boundary(self) -> bool: ...
    def set_gradient_accumulation_boundary(self, boundary: bool) -> None: ...
    def set_gradient_accumulation_steps(self, steps: int) -> None: ...
    def begin_no_sync(self) -> None: ...
    def end_no_sync(self) -> None: ...
    def begin_coalesce(self) -> None: ...
    def end_coalesce(self) -> None: ...
    def global_grad_norm(self) -> float | None: ...
    def grad_norm(self) -> float: ...
    def was_step_applied(self) -> bool: ...
    def micro_steps(self) -> int: ...
    def global_steps(self) -> int: ...
    def skipped_steps(self) -> int: ...
    def set_counters(self, micro_steps: int, global_steps: int, skipped_steps: int) -> None: ...
    def groups(self) -> list[GroupOptions]: ...
    def options(self) -> EngineOptions: ...
    def mesh(self) -> Mesh: ...
    def memory(self) -> Memory: ...
    def params(self) -> list[ParamSpec]: ...
    def param_step(self, param: int) -> int: ...
    def set_param_step(self, param: int, step: int) -> None: ...
    def get_full(self, param: int, what: Quantity) -> torch.Tensor | None: ...
    def set_full(self, param: int, what: Quantity, value: torch.Tensor) -> None: ...
    def local_view(self, param: int, what: Quantity) -> torch.Tensor | None: ...
    def local_range(self, param: int) -> tuple[int, int]: ...
    def refresh_params(self) -> None: ...
    def adopt_params(self) -> None: ...
    def destroy(self) -> None: ...
    def destroyed(self) -> bool: ...
