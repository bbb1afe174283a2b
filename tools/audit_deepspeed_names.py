#!/usr/bin/env python3
"""Says of every name of `deepspeed` that clients and programs use whether the alias package serves it.

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
deepspeed.runtime.utils: move_to_device
deepspeed.runtime.torch_autocast: init_autocast_params has_autocast_dtype
deepspeed.ops.aio: AsyncIOBuilder
deepspeed.ops: __compatible_ops__
deepspeed.launcher.runner: DEEPSPEED_ENVIRONMENT_NAME main fetch_hostfile
deepspeed.accelerator: get_accelerator
deepspeed.monitor.monitor: MonitorMaster
deepspeed.monitor.config: DeepSpeedMonitorConfig
deepspeed.profiling.flops_profiler: FlopsProfiler get_model_profile
deepspeed.elasticity: compute_elastic_config elasticity_enabled
deepspeed.elasticity.config: ElasticityError ElasticityConfigError ElasticityIncompatibleWorldSize
deepspeed.ops.lamb: FusedLamb
deepspeed.runtime.config: DeepSpeedConfig
deepspeed.module_inject.layers: set_autotp_mode is_autotp_training_mode
deepspeed.runtime.sequence_parallel.parallel_state_sp: initialize_sequence_parallel
"""
REFUSED = """
deepspeed: init_inference InferenceEngine DeepSpeedHybridEngine
deepspeed.zero: TiledLinear TiledLinearReturnBias MiCS_Init DeepSpeedTensorOverride
deepspeed.moe.layer: MoE
deepspeed.compression: init_compression
deepspeed.autotuning: Autotuner
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
"""
OPTIMIZER = "param_groups state defaults state_dict load_state_dict step zero_grad add_param_group"
WRAPPER = "overflow optimizer loss_scale cur_scale needs_scaler"  # of stages above 0
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
        ("engine", engine, ENGINE),
        ("optimizer", engine.optimizer, OPTIMIZER + " " * (stage > 0) + WRAPPER * (stage > 0)),
    ]
    if stage == 3:
        owners.append(("parameter", engine.module.layer.weight, PARAMETER))
    try:
        for owner, of, members in owners:
            for name in members.split():
                yield f"{'served' if hasattr(of, name) else 'missing':8} {owner}.{name} (stage {stage})"
    finally:
        engine.destroy()


def lines() -> Iterator[str]:
    for module, name in names(SERVED) + names(REFUSED) + names(EITHER):
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
