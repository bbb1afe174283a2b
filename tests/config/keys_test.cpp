#include "tessera/config/keys.h"

#include <algorithm>
#include <set>

#include "support.h"
#include "tessera/config/lookup.h"

namespace tessera::config {
namespace {

// The frozen surface: a key that goes away or changes its name breaks users' files.
const std::vector<std::string>& frozen_keys() {
  static const std::vector<std::string> all{
      "activation_checkpointing.contiguous_memory_optimization",
      "activation_checkpointing.cpu_checkpointing",
      "activation_checkpointing.number_checkpoints",
      "activation_checkpointing.partition_activations",
      "activation_checkpointing.profile",
      "activation_checkpointing.synchronize_checkpoint_boundary",
      "bf16.bf16_master_weights_and_grads",
      "bf16.bf16_optimizer_states",
      "bf16.check_grad_overflow",
      "bf16.enabled",
      "bf16.immediate_grad_update",
      "checkpoint.async_io",
      "checkpoint.asynchronous",
      "checkpoint.checkpoint_serialization",
      "checkpoint.format",
      "checkpoint.keep_last",
      "checkpoint.load_universal",
      "checkpoint.parallel_write.pipeline_stage",
      "checkpoint.random_state",
      "checkpoint.tag_validation",
      "checkpoint.use_node_local_storage",
      "checkpoint.writer",
      "comet.api_key",
      "comet.enabled",
      "comet.experiment_key",
      "comet.experiment_name",
      "comet.mode",
      "comet.online",
      "comet.project",
      "comet.samples_log_interval",
      "comet.workspace",
      "comms_logger.debug",
      "comms_logger.enabled",
      "comms_logger.prof_all",
      "comms_logger.prof_ops",
      "comms_logger.verbose",
      "communication_data_type",
      "compile.autoep_non_moe",
      "compile.debug_log",
      "compile.deepcompile",
      "compile.double_buffer",
      "compile.free_activation",
      "compile.free_activation_threshold",
      "compile.keep_all_input_tensors",
      "compile.keep_int_input_tensors",
      "compile.offload_activation",
      "compile.offload_activation_pin_memory",
      "compile.offload_opt_states",
      "compile.offload_parameters",
      "compile.passes",
      "compile.symmetric_memory",
      "compile.sync_after_allgather",
      "compile.sync_after_reduce",
      "compile.sync_before_allgather",
      "compile.sync_before_reduce",
      "csv_monitor.enabled",
      "csv_monitor.job_name",
      "csv_monitor.output_path",
      "data_parallel_size",
      "data_types.buffer_dtype",
      "data_types.grad_accum_dtype",
      "data_types.keep_in_fp32_modules",
      "data_types.param_dtype",
      "dataloader_drop_last",
      "disable_python_gc",
      "dump_state",
      "elasticity.enabled",
      "elasticity.ignore_non_elastic_batch_info",
      "elasticity.max_gpus",
      "elasticity.max_train_batch_size",
      "elasticity.micro_batch_sizes",
      "elasticity.min_gpus",
      "elasticity.min_time",
      "elasticity.model_parallel_size",
      "elasticity.num_gpus_per_node",
      "elasticity.prefer_larger_batch",
      "elasticity.version",
      "flops_profiler.detailed",
      "flops_profiler.enabled",
      "flops_profiler.module_depth",
      "flops_profiler.output_file",
      "flops_profiler.profile_step",
      "flops_profiler.recompute_fwd_factor",
      "flops_profiler.top_modules",
      "fp16.auto_cast",
      "fp16.consecutive_hysteresis",
      "fp16.enabled",
      "fp16.fp16_master_weights_and_grads",
      "fp16.hysteresis",
      "fp16.initial_scale_power",
      "fp16.loss_scale",
      "fp16.loss_scale_window",
      "fp16.min_loss_scale",
      "gradient_accumulation_steps",
      "gradient_allreduce_op",
      "gradient_clipping",
      "gradient_predivide_factor",
      "graph_harvesting",
      "log_level",
      "managed_gradient_accumulation",
      "memory_breakdown",
      "optimizer.legacy_fusion",
      "optimizer.params",
      "optimizer.type",
      "pipeline.activation_checkpoint_interval",
      "pipeline.grad_partitioned",
      "pipeline.partition",
      "pipeline.pipe_partitioned",
      "pipeline.schedule",
      "pipeline.seed_layers",
      "pipeline.stages",
      "pipeline.use_reentrant",
      "prescale_gradients",
      "scheduler.params",
      "scheduler.type",
      "seq_parallel_communication_data_type",
      "sequence_parallel_size",
      "sparse_gradients",
      "steps_per_print",
      "tensor_parallel.autotp_size",
      "tensor_parallel.dtype",
      "tensor_parallel.injection_policy_tuple",
      "tensor_parallel.keep_module_on_host",
      "tensor_parallel.partition_config",
      "tensor_parallel.preset_model",
      "tensor_parallel.replace_with_kernel_inject",
      "tensor_parallel.tp.mpu",
      "tensor_parallel.tp.tp_grain_size",
      "tensor_parallel.tp.tp_group",
      "tensor_parallel.tp.tp_size",
      "tensor_parallel.tp_overlap_comm",
      "tensor_parallel.vocab_parallel_ce_backend",
      "tensor_parallel.vocab_parallel_lm_head",
      "tensorboard.enabled",
      "tensorboard.job_name",
      "tensorboard.output_path",
      "tessera.broadcast_buffers",
      "tessera.clip",
      "tessera.clip_by_unit",
      "tessera.device_reserve",
      "tessera.device_share",
      "tessera.json_lines",
      "tessera.min_unit_elements",
      "tessera.rounding",
      "tessera.seed",
      "tessera.sequence_parallel_norms",
      "tessera.shared_parameters",
      "tessera.state_bytes",
      "tessera.update_in_backward",
      "tessera.update_runs_on",
      "timers.throughput.enabled",
      "timers.throughput.synchronized",
      "torch_autocast.dtype",
      "torch_autocast.enabled",
      "torch_autocast.lower_precision_safe_modules",
      "train_batch_size",
      "train_micro_batch_size_per_gpu",
      "wall_clock_breakdown",
      "wandb.enabled",
      "wandb.group",
      "wandb.project",
      "wandb.team",
      "zero_allow_untested_optimizer",
      "zero_force_ds_cpu_optimizer",
      "zero_optimization.allgather_bucket_size",
      "zero_optimization.allgather_partitions",
      "zero_optimization.compute_grad_norm",
      "zero_optimization.contiguous_gradients",
      "zero_optimization.elastic_checkpoint",
      "zero_optimization.enable_sanity_checks",
      "zero_optimization.ignore_unused_parameters",
      "zero_optimization.leaf_module.classes",
      "zero_optimization.leaf_module.name_suffixes",
      "zero_optimization.leaf_module.names",
      "zero_optimization.legacy_stage1",
      "zero_optimization.load_from_fp32_weights",
      "zero_optimization.log_trace_cache_warnings",
      "zero_optimization.memory_efficient_linear",
      "zero_optimization.mics_hierarchical_params_gather",
      "zero_optimization.mics_shard_size",
      "zero_optimization.offload_optimizer.buffer_count",
      "zero_optimization.offload_optimizer.cpuadam_cores_perc",
      "zero_optimization.offload_optimizer.device",
      "zero_optimization.offload_optimizer.fast_init",
      "zero_optimization.offload_optimizer.nvme_path",
      "zero_optimization.offload_optimizer.pin_memory",
      "zero_optimization.offload_optimizer.pipeline_read",
      "zero_optimization.offload_optimizer.pipeline_write",
      "zero_optimization.offload_optimizer.ratio",
      "zero_optimization.offload_optimizer.super_offload",
      "zero_optimization.offload_param.buffer_count",
      "zero_optimization.offload_param.buffer_size",
      "zero_optimization.offload_param.device",
      "zero_optimization.offload_param.max_in_cpu",
      "zero_optimization.offload_param.nvme_path",
      "zero_optimization.offload_param.pin_memory",
      "zero_optimization.overlap_comm",
      "zero_optimization.override_module_apply",
      "zero_optimization.parameter_alignment",
      "zero_optimization.pipeline_loading_checkpoint",
      "zero_optimization.reduce_bucket_size",
      "zero_optimization.reduce_scatter",
      "zero_optimization.round_robin_gradients",
      "zero_optimization.save_muon_momentum_buffer_in_memory",
      "zero_optimization.stage",
      "zero_optimization.stage3_allgather_sequential",
      "zero_optimization.stage3_gather_16bit_weights_on_model_save",
      "zero_optimization.stage3_max_live_parameters",
      "zero_optimization.stage3_max_reuse_distance",
      "zero_optimization.stage3_model_persistence_threshold",
      "zero_optimization.stage3_module_granularity_threshold",
      "zero_optimization.stage3_param_persistence_threshold",
      "zero_optimization.stage3_prefetch_bucket_size",
      "zero_optimization.stage3_use_all_reduce_for_fetch_params",
      "zero_optimization.sub_group_size",
      "zero_optimization.use_multi_rank_bucket_allreduce",
      "zero_optimization.zero_hpz_partition_size",
      "zero_optimization.zero_quantized_gradients",
      "zero_optimization.zero_quantized_nontrainable_weights",
      "zero_optimization.zero_quantized_weights",
  };
  return all;
}

TEST(Keys, SurfaceIsFrozen) {
  std::vector<std::string> now;
  for (const Key& key : keys()) {
    now.push_back(key.path);
  }
  std::sort(now.begin(), now.end());
  EXPECT_EQ(now, frozen_keys());
}

TEST(Keys, EveryRowHasItsOwnMemberAndName) {
  Config c;
  std::set<std::string> names;
  std::set<const void*> members;
  for (const Key& key : keys()) {
    EXPECT_TRUE(names.insert(key.path).second) << key.path;
    EXPECT_FALSE(key.meaning.empty()) << key.path;
    std::visit(
        [&](const auto& field) {
          if constexpr (!std::is_same_v<std::decay_t<decltype(field)>, EnumField>) {
            EXPECT_TRUE(members.insert(field).second) << key.path;
          }
        },
        key.field(c));
  }
}

TEST(Keys, WhatHasNoEffectWhateverItsValueIsNoMember) {
  int rows = 0;
  for (const Key& key : keys()) {
    if (!key.meaning.starts_with("no effect: ")) continue;
    EXPECT_TRUE(key.unread.has_value()) << key.path;
    ++rows;
  }
  EXPECT_EQ(rows, 7);
}

TEST(Keys, EnumRowsReadAndWriteTheirMember) {
  Config c;
  for (const Key& key : keys()) {
    const Field field = key.field(c);
    if (const auto* e = std::get_if<EnumField>(&field)) {
      for (int i = 0; i < int(e->names.size()); ++i) {
        e->set(i);
        EXPECT_EQ(e->get(), i) << key.path;
      }
    }
  }
  EXPECT_EQ(c.zero_optimization.offload_param.device, OffloadDevice::Nvme);
}

TEST(Keys, TheReferenceTableOfTheDocsIsUpToDate) {
  expect_table("key", reference_table());
}

}  // namespace
}  // namespace tessera::config
