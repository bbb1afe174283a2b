"""Keys of a configuration that have an effect. tools/make_config_stub.py writes it from the table of keys."""

from typing import Any, Final, Literal

import torch

class _Optimizer:
    type: Final[str]
    params: Final[dict[str, Any]]

class _Scheduler:
    type: Final[str]
    params: Final[dict[str, Any]]

class _Bf16:
    enabled: Final[bool]
    check_grad_overflow: Final[bool]
    bf16_master_weights_and_grads: Final[bool]
    bf16_optimizer_states: Final[bool]

class _Fp16:
    enabled: Final[bool]
    auto_cast: Final[bool]
    loss_scale: Final[float]
    initial_scale_power: Final[int]
    loss_scale_window: Final[int]
    hysteresis: Final[int]
    consecutive_hysteresis: Final[bool]
    min_loss_scale: Final[int]
    fp16_master_weights_and_grads: Final[bool]

class _TorchAutocast:
    enabled: Final[bool]
    dtype: Final[torch.dtype | None]
    lower_precision_safe_modules: Final[list[str] | None]

class _DataTypes:
    grad_accum_dtype: Final[torch.dtype | None]
    param_dtype: Final[torch.dtype | None]
    buffer_dtype: Final[torch.dtype | None]
    keep_in_fp32_modules: Final[list[str] | None]

class _ZeroOptimizationOffloadOptimizer:
    device: Final[str]
    nvme_path: Final[str | None]
    buffer_count: Final[int]
    pin_memory: Final[bool]
    ratio: Final[float | Literal["auto"]]
    super_offload: Final[bool]

class _ZeroOptimizationOffloadParam:
    device: Final[str]
    nvme_path: Final[str | None]
    buffer_count: Final[int]
    buffer_size: Final[int]
    max_in_cpu: Final[int]
    pin_memory: Final[bool]

class _ZeroOptimizationLeafModule:
    classes: Final[list[str]]
    names: Final[list[str]]
    name_suffixes: Final[list[str]]

class _ZeroOptimization:
    stage: Final[int]
    reduce_scatter: Final[bool]
    reduce_bucket_size: Final[int]
    overlap_comm: Final[bool | None]
    load_from_fp32_weights: Final[bool]
    offload_optimizer: Final[_ZeroOptimizationOffloadOptimizer]
    offload_param: Final[_ZeroOptimizationOffloadParam]
    stage3_prefetch_bucket_size: Final[int]
    stage3_param_persistence_threshold: Final[int]
    stage3_model_persistence_threshold: Final[int]
    stage3_max_live_parameters: Final[int]
    stage3_max_reuse_distance: Final[int]
    stage3_gather_16bit_weights_on_model_save: Final[bool]
    stage3_module_granularity_threshold: Final[int]
    ignore_unused_parameters: Final[bool]
    legacy_stage1: Final[bool]
    zero_hpz_partition_size: Final[int]
    zero_quantized_weights: Final[bool]
    zero_quantized_nontrainable_weights: Final[bool]
    zero_quantized_gradients: Final[bool]
    mics_shard_size: Final[int]
    leaf_module: Final[_ZeroOptimizationLeafModule]

class _TensorParallelTp:
    tp_size: Final[int]
    tp_grain_size: Final[int]
    mpu: Final[Any]
    tp_group: Final[Any]

class _TensorParallel:
    autotp_size: Final[int]
    preset_model: Final[str | None]
    partition_config: Final[Any]
    tp: Final[_TensorParallelTp]
    dtype: Final[torch.dtype | None]
    tp_overlap_comm: Final[bool]
    vocab_parallel_lm_head: Final[Any]

class _Checkpoint:
    tag_validation: Final[str]
    format: Final[str]
    load_universal: Final[bool]
    asynchronous: Final[bool]
    keep_last: Final[int]
    random_state: Final[bool]

class _Pipeline:
    schedule: Final[str]
    activation_checkpoint_interval: Final[int]

class _ActivationCheckpointing:
    partition_activations: Final[bool]
    cpu_checkpointing: Final[bool]
    synchronize_checkpoint_boundary: Final[bool]
    profile: Final[bool]

class _FlopsProfiler:
    enabled: Final[bool]
    recompute_fwd_factor: Final[float]
    profile_step: Final[int]
    module_depth: Final[int]
    top_modules: Final[int]
    detailed: Final[bool]
    output_file: Final[str | None]

class _Tensorboard:
    enabled: Final[bool]
    output_path: Final[str]
    job_name: Final[str]

class _CsvMonitor:
    enabled: Final[bool]
    output_path: Final[str]
    job_name: Final[str]

class _Wandb:
    enabled: Final[bool]
    group: Final[str | None]
    team: Final[str | None]
    project: Final[str]

class _Comet:
    enabled: Final[bool]
    samples_log_interval: Final[int]
    project: Final[str | None]
    workspace: Final[str | None]
    api_key: Final[str | None]
    experiment_name: Final[str | None]
    experiment_key: Final[str | None]
    online: Final[bool | None]
    mode: Final[str | None]

class _CommsLogger:
    enabled: Final[bool]
    verbose: Final[bool]
    prof_all: Final[bool]
    debug: Final[bool]
    prof_ops: Final[list[str]]

class _Compile:
    deepcompile: Final[bool]

class _Elasticity:
    enabled: Final[bool]
    max_train_batch_size: Final[int]
    micro_batch_sizes: Final[list[int]]
    min_gpus: Final[int]
    max_gpus: Final[int]
    num_gpus_per_node: Final[int]
    model_parallel_size: Final[int]
    prefer_larger_batch: Final[bool]
    ignore_non_elastic_batch_info: Final[bool]
    version: Final[float]

class _Tessera:
    min_unit_elements: Final[int]
    state_bytes: Final[int | None]
    rounding: Final[str | None]
    seed: Final[int]
    broadcast_buffers: Final[bool]
    shared_parameters: Final[bool]
    update_in_backward: Final[bool]
    update_runs_on: Final[bool]
    clip: Final[str | None]
    clip_by_unit: Final[bool]
    device_share: Final[float | Literal["auto"]]
    device_reserve: Final[float]
    sequence_parallel_norms: Final[bool]
    json_lines: Final[str | None]

class _Keys:
    train_batch_size: Final[int | None]
    train_micro_batch_size_per_gpu: Final[int | None]
    gradient_accumulation_steps: Final[int | None]
    optimizer: Final[_Optimizer]
    scheduler: Final[_Scheduler]
    gradient_clipping: Final[float]
    managed_gradient_accumulation: Final[bool]
    gradient_allreduce_op: Final[str]
    communication_data_type: Final[torch.dtype | None]
    seq_parallel_communication_data_type: Final[torch.dtype]
    bf16: Final[_Bf16]
    fp16: Final[_Fp16]
    torch_autocast: Final[_TorchAutocast]
    data_types: Final[_DataTypes]
    zero_optimization: Final[_ZeroOptimization]
    zero_allow_untested_optimizer: Final[bool]
    zero_force_ds_cpu_optimizer: Final[bool]
    tensor_parallel: Final[_TensorParallel]
    sequence_parallel_size: Final[int]
    steps_per_print: Final[int | None]
    wall_clock_breakdown: Final[bool]
    memory_breakdown: Final[bool]
    dump_state: Final[bool]
    log_level: Final[str | None]
    dataloader_drop_last: Final[bool]
    graph_harvesting: Final[bool]
    disable_python_gc: Final[bool]
    checkpoint: Final[_Checkpoint]
    pipeline: Final[_Pipeline]
    activation_checkpointing: Final[_ActivationCheckpointing]
    flops_profiler: Final[_FlopsProfiler]
    tensorboard: Final[_Tensorboard]
    csv_monitor: Final[_CsvMonitor]
    wandb: Final[_Wandb]
    comet: Final[_Comet]
    comms_logger: Final[_CommsLogger]
    compile: Final[_Compile]
    elasticity: Final[_Elasticity]
    tessera: Final[_Tessera]
