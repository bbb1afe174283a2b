#!/usr/bin/env python3
"""Says of every name of `deepspeed` whether the alias package serves it: of those that clients and programs use, and of
all that its list (names.txt, written by index_deepspeed_names.py) has.

usage: audit_deepspeed_names.py     with `tessera` and Tessera's `deepspeed` on the path; exit status 1: one is missing

A line a name: "served", "refused" with what it says when it is used, or "missing". The members of an engine, of its
optimizer and of partitioned parameters are looked up at an engine that is built for it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

# "module: names". Names of one's own dialect that programs import.
SERVED = """
deepspeed: initialize init_distributed add_config_arguments add_tuning_arguments tp_model_init set_autotp_mode
  DeepSpeedEngine DeepSpeedConfig DeepSpeedConfigError zero comm ops utils checkpointing OnDevice log_dist logger
  __version__ version dist accelerator runtime
deepspeed.zero: Init GatheredParameters register_external_parameter unregister_external_parameter ZeroParamStatus
  ZeroParamType unwrap_model_for_generation DeepSpeedZeRoOffload
deepspeed.utils: logger log_dist RepeatingLoader groups instrument_w_nvtx set_log_level_from_string zero_to_fp32
  set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module z3_leaf_parameter set_z3_leaf_module
  set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix safe_get_full_fp32_param safe_get_full_grad
  safe_get_full_optimizer_state safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state
  safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state safe_set_local_fp32_param
  safe_set_local_grad safe_set_local_optimizer_state safe_update_full_grad_vectorized
deepspeed.comm: init_distributed is_initialized is_available get_rank get_local_rank get_world_size get_world_group
  new_group get_global_rank get_all_ranks_from_group barrier monitored_barrier broadcast broadcast_object_list
  all_reduce all_reduce_coalesced inference_all_reduce reduce reduce_scatter reduce_scatter_fn reduce_scatter_tensor
  all_gather all_gather_object all_gather_into_tensor allgather_fn all_to_all_single all_to_all gather scatter send
  recv isend irecv destroy_process_group initialize_mesh_device log_summary configure ReduceOp ProcessGroup
deepspeed.runtime.lr_schedules: VALID_LR_SCHEDULES WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest
deepspeed.ops.adam: DeepSpeedCPUAdam FusedAdam
deepspeed.ops.adagrad: DeepSpeedCPUAdagrad
deepspeed.ops.lion: DeepSpeedCPULion FusedLion
deepspeed.utils.zero_to_fp32: get_fp32_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict
  load_state_dict_from_zero_checkpoint
deepspeed.checkpoint.ds_to_universal: main
deepspeed.sequence.layer: DistributedAttention _SeqAllToAll
deepspeed.sequence.cross_entropy: vocab_sequence_parallel_cross_entropy
deepspeed.runtime.sequence_parallel.ulysses_sp: UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter TiledMLP
  sequence_tiled_compute SequenceTiledCompute TiledFusedLogitsLoss
deepspeed.checkpoint.utils: clone_tensors_for_torch_save
deepspeed.checkpointing: configure checkpoint is_configured get_cuda_rng_tracker model_parallel_cuda_manual_seed
deepspeed.runtime.engine: DeepSpeedEngine
deepspeed.runtime.base_optimizer: DeepSpeedOptimizer
deepspeed.runtime.zero.stage_1_and_2: DeepSpeedZeroOptimizer
deepspeed.runtime.zero.partition_parameters: ZeroParamStatus zero_wrapper_for_fp_tensor_constructor _orig_torch_arange
  get_accelerator
deepspeed.runtime.zero.utils: ZeRORuntimeException
deepspeed.runtime.zero.offload_config: OffloadDeviceEnum OffloadStateTypeEnum
deepspeed.runtime.utils: move_to_device partition_uniform partition_balanced DummyOptim
deepspeed.runtime.torch_autocast: init_autocast_params has_autocast_dtype
deepspeed.ops.aio: AsyncIOBuilder
deepspeed.ops: __compatible_ops__
deepspeed.launcher.runner: DEEPSPEED_ENVIRONMENT_NAME main fetch_hostfile
deepspeed.accelerator: get_accelerator
deepspeed.monitor.monitor: MonitorMaster
deepspeed.monitor.config: DeepSpeedMonitorConfig get_monitor_config TensorBoardConfig CSVConfig
deepspeed.profiling.flops_profiler: FlopsProfiler get_model_profile
deepspeed.elasticity: compute_elastic_config elasticity_enabled
deepspeed.elasticity.config: ElasticityError ElasticityConfigError ElasticityIncompatibleWorldSize
deepspeed.ops.lamb: FusedLamb
deepspeed.ops.lamb.fused_lamb: FusedLamb
deepspeed.ops.lion.fused_lion: FusedLion
deepspeed.ops.lion.cpu_lion: DeepSpeedCPULion
deepspeed.ops.adagrad.cpu_adagrad: DeepSpeedCPUAdagrad
deepspeed.ops.op_builder: AsyncIOBuilder CPUAdamBuilder CPUAdagradBuilder CPULionBuilder FusedAdamBuilder
  FusedLambBuilder FusedLionBuilder UtilsBuilder CCLCommBuilder ShareMemCommBuilder EvoformerAttnBuilder
  FPQuantizerBuilder PinMemoryBuilder OpBuilder
deepspeed.runtime.zero.stage_1_and_2: estimate_zero2_model_states_mem_needs
  estimate_zero2_model_states_mem_needs_all_live estimate_zero2_model_states_mem_needs_all_cold
deepspeed.runtime.zero.stage3: DeepSpeedZeroOptimizer_Stage3 estimate_zero3_model_states_mem_needs
  estimate_zero3_model_states_mem_needs_all_live estimate_zero3_model_states_mem_needs_all_cold
deepspeed.runtime.zero.muon.original_muon: Muon MuonWithAuxAdam SingleDeviceMuonWithAuxAdam
  zeropower_via_newtonschulz5
deepspeed.runtime.zero.muon.muon_optimizer: MuonWithAuxAdam
deepspeed.runtime.zero.leaf_module_config: DEFAULT_LEAF_MODULE_CLASSES DeepSpeedZeroLeafModuleConfig
deepspeed.monitor.csv_monitor: csvMonitor
deepspeed.monitor.tensorboard: TensorBoardMonitor
deepspeed.monitor.wandb: WandbMonitor
deepspeed.monitor.comet: CometMonitor
deepspeed.runtime.pipe.topology: ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology
  PipelineParallelGrid
deepspeed.utils.groups: _get_data_parallel_group _get_data_parallel_rank _get_data_parallel_world_size
  _get_sequence_parallel_group _get_sequence_parallel_rank _get_sequence_parallel_world_size
  _get_sequence_data_parallel_group _get_model_parallel_world_size get_model_parallel_group get_data_parallel_group
  get_tensor_model_parallel_src_rank _init_tp_mesh_device
deepspeed.utils.timer: SynchronizedWallClockTimer ThroughputTimer FORWARD_GLOBAL_TIMER BACKWARD_GLOBAL_TIMER
deepspeed.utils.logging: logger log_dist print_json_dist warning_once
deepspeed.runtime.constants: ROUTE_TRAIN TRAIN_BATCH_SIZE
deepspeed.runtime.fp16.loss_scaler: DynamicLossScaler LossScaler INITIAL_LOSS_SCALE
deepspeed.git_version_info: version compatible_ops installed_ops torch_info git_hash git_branch
deepspeed.runtime.config: DeepSpeedConfig DeepSpeedConfigError get_monitor_config ADAM_OPTIMIZER MUON_OPTIMIZER
deepspeed.runtime.config_utils: DeepSpeedConfigModel get_scalar_param
deepspeed.runtime.compiler: is_compile_supported disable is_compiling
deepspeed.module_inject.layers: set_autotp_mode is_autotp_training_mode LinearLayer LinearAllreduce
  GatherReplacedLayerParams
deepspeed.module_inject.tp_shard: get_shard_size get_shard_size_list set_num_kv_heads AutoTPMeta
deepspeed.utils.tensor_fragment: fragment_address
deepspeed.moe.utils: split_params_into_different_moe_groups_for_optimizer
deepspeed.accelerator: is_current_accelerator_supported
deepspeed.runtime.sequence_parallel.parallel_state_sp: initialize_sequence_parallel get_sequence_parallel_group
  get_sequence_parallel_rank get_sequence_parallel_world_size get_sequence_data_parallel_group get_model_parallel_group
"""
REFUSED = """
deepspeed: init_inference InferenceEngine DeepSpeedHybridEngine
deepspeed.zero: TiledLinear TiledLinearReturnBias DeepSpeedTensorOverride
deepspeed.moe.layer: MoE
deepspeed.compression: init_compression
deepspeed.autotuning: Autotuner
deepspeed.module_inject.auto_tp: AutoTP
deepspeed.runtime.sparse_tensor: SparseTensor
deepspeed.runtime.utils: CheckOverflow
deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine: TorchCheckpointEngine
deepspeed.runtime.lr_schedules: get_config_from_args
deepspeed.comm.torch: TorchBackend
"""
EITHER = "deepspeed: PipelineModule"  # as far as this Tessera has pipelines
ENGINE = """
forward backward scale step zero_grad is_gradient_accumulation_boundary set_gradient_accumulation_boundary no_sync
coalesce_grad_reduction module optimizer lr_scheduler training_dataloader device config global_steps micro_steps
global_samples skipped_steps local_rank global_rank world_size dp_world_size get_global_grad_norm was_step_applied
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps set_train_batch_size get_batch_info get_lr
get_mom zero_optimization_stage zero_gather_16bit_weights_on_model_save save_checkpoint load_checkpoint
save_16bit_model save_fp16_model module_state_dict load_module_state_dict deepspeed_io empty_partition_cache destroy
compile is_compiled monitor get_wall_clock_timers flops_profiler tput_timer get_sequence_parallel_group
get_data_parallel_rank get_tensor_parallel_rank get_model_parallel_rank _backward_epilogue
_consolidated_16bit_state_dict _zero3_consolidated_16bit_state_dict _get_zero_param_shapes _config
_is_gradient_accumulation_boundary sparse_tensor_module_names generate_something
gradient_average param_names mpu is_map_style_dataset is_iterable_style_dataset offload_states reload_states
set_train_micro_batch_size get_data_types optimizer_name optimizer_params optimizer_legacy_fusion scheduler_name
scheduler_params loss_scale dynamic_loss_scale initial_dynamic_scale dynamic_loss_scale_args fp16_enabled
fp16_auto_cast fp16_master_weights_and_gradients bfloat16_enabled bf16_master_weights_and_gradients
bf16_optimizer_states torch_autocast_enabled torch_autocast_dtype torch_autocast_lower_precision_safe_modules
gradient_clipping postscale_gradients gradient_predivide_factor communication_data_type sparse_gradients_enabled
managed_gradient_accumulation steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level
dataloader_drop_last use_node_local_storage load_universal_checkpoint checkpoint_serialization_enabled
checkpoint_tag_validation_enabled checkpoint_tag_validation_fail checkpoint_writer_enabled elasticity_enabled
flops_profiler_enabled flops_profiler_recompute_fwd_factor flops_profiler_profile_step flops_profiler_module_depth
flops_profiler_top_modules flops_profiler_detailed flops_profiler_output_file autotp_size tensor_parallel_config
mics_shard_size super_offload cpuadam_cores_perc is_sanity_checks_enabled is_first_weights_partition_group
graph_harvesting zero_optimization zero_allgather_bucket_size zero_allgather_partitions zero_allgather_sequential
zero_allow_untested_optimizer zero_contiguous_gradients zero_cpu_offload zero_elastic_checkpoint
zero_force_ds_cpu_optimizer zero_hpz_partition_size zero_ignore_unused_parameters zero_legacy_stage1
zero_load_from_fp32_weights zero_log_trace_cache_warnings zero_max_live_parameters zero_max_reuse_distance
zero_model_persistence_threshold zero_module_granularity_threshold zero_multi_rank_bucket_allreduce
zero_nvme_offload_optimizer zero_offload_optimizer zero_offload_param zero_optimization_partition_gradients
zero_optimization_partition_weights zero_overlap_comm zero_param_persistence_threshold zero_partial_offload
zero_prefetch_bucket_size zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights
zero_reduce_bucket_size zero_reduce_scatter zero_round_robin_gradients zero_save_muon_momentum_buffer_in_memory
zero_sub_group_size zero_use_cpu_optimizer zenflow_config zeropp_loco_param amp_enabled autotuning_enabled
compile_autosp compile_autotp compile_zero_optimization_stage curriculum_enabled_legacy curriculum_learning_enabled
data_efficiency_enabled data_sampling_enabled eigenvalue_enabled get_pld_theta is_deepcompile_active
is_deepcompile_enabled is_elastic_model_parallel_supported pld_enabled random_ltd_enabled
uses_parallelization_pass_only allreduce_gradients
"""
ENGINE_REFUSED = """
aio_config all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_no_retain amp_params
autotuning_metric buffered_allreduce_fallback clip_fp32_gradients curriculum_learning_config curriculum_params_legacy
data_efficiency_config data_sampling_config eigenvalue_max_iter get_compile_time get_deepspeed_compile_backend
get_optimizer_configuration load_moe_state_dict pld_gamma pld_params pld_theta print_forward_breakdown
quantize_training random_ltd_config random_ltd_initialize register_compile_pass
set_custom_curriculum_learning_schedule set_data_post_process_func sparse_allreduce swap_tensor_config
"""
OPTIMIZER = "param_groups state defaults state_dict load_state_dict step zero_grad add_param_group"
# Of stages above 0.
WRAPPER = """
overflow optimizer loss_scale cur_scale needs_scaler clip_grad cpu_offload get_param_id partition_gradients
"""
PARAMETER = "ds_id ds_status ds_shape ds_numel ds_tensor partition_numel ds_active_sub_modules"  # of stage 3


def names(rows: str) -> list[tuple[str, str]]:
    """(module, name) of such a list."""
    found, module = [], ""
    for word in rows.split():
        if word.endswith(":"):
            module = word[:-1]
        else:
            found.append((module, word))
    return found


def state_of(module: str, name: str) -> str:
    """ "served", "refused: why" or "missing"."""
    from deepspeed import _lazy

    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return "missing"
    return f"refused: {found._says}" if isinstance(found, _lazy._RefusingType) else "served"


def _model() -> Any:
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

        def generate_something(self) -> None:
            """Attributes of the module are reached through the engine."""

    return Model()


def _state_of_member(of: object, name: str) -> tuple[str, str]:
    try:
        getattr(of, name)
    except NotImplementedError as error:
        return "refused", f": {error}"
    except AttributeError:
        return "missing", ""
    return "served", ""


def member_lines(stage: int) -> Iterator[str]:
    """A line for each member of an engine of this stage."""
    import deepspeed

    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = deepspeed.initialize(model=_model(), config=config)[0]
    owners = [
        ("engine", engine, ENGINE + ENGINE_REFUSED),
        ("optimizer", engine.optimizer, OPTIMIZER + " " * (stage > 0) + WRAPPER * (stage > 0)),
    ]
    if stage == 3:
        owners.append(("parameter", engine.module.layer.weight, PARAMETER))
    try:
        for owner, of, members in owners:
            for name in members.split():
                state, why = _state_of_member(of, name)
                yield f"{state:8} {owner}.{name} (stage {stage}){why}"
    finally:
        engine.destroy()


def listed() -> list[tuple[str, str]]:
    """(module, name) of everything that DeepSpeed has."""
    from deepspeed import _names

    return [(module, name) for module, found in _names.index().items() for name in found]


def lines() -> Iterator[str]:
    for module, name in dict.fromkeys(names(SERVED) + names(REFUSED) + names(EITHER) + listed()):
        state, _, why = state_of(module, name).partition(": ")
        yield f"{state:8} {module}.{name}" + (f": {why}" if why else "")
    for stage in (0, 2, 3):
        yield from member_lines(stage)


def main() -> int:
    found = list(lines())
    print(*found, sep="\n")
    count = {state: sum(line.startswith(state) for line in found) for state in ("served", "refused", "missing")}
    print(", ".join(f"{number} {state}" for state, number in count.items()))
    return 1 if count["missing"] else 0


if __name__ == "__main__":
    sys.exit(main())
