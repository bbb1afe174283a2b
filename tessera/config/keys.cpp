#include "tessera/config/keys.h"

namespace tessera::config {
namespace {

// The path of a row is the spelling of its member, so the two cannot differ.
#define FIELD(member) #member, [](Config& c) -> Field { return &c.member; }
#define ENUM_FIELD(member, Type, ...)                                                                       \
  [](Config& c) -> Field {                                                                                  \
    auto* field = &c.member;                                                                                \
    return EnumField{{__VA_ARGS__}, [field] { return int(*field); }, [field](int v) { *field = Type(v); }}; \
  }

Limits any() {
  return {};
}
Limits at_least(double min) {
  return {.min = min};
}
Limits above(double min) {
  return {.min = min, .above = true};
}
Limits between(double min, double max) {
  return {.min = min, .max = max};
}
Limits one_of(std::vector<std::string> choices) {
  return {.choices = std::move(choices)};
}
Limits one_is_list() {
  return {.one_is_list = true};
}
Limits null_only() {
  return {.null_only = true};
}
// Numbers that refuse bool. Their range is checked only while they are used.
Limits by_rule() {
  return {.no_bool = true, .checked_by_rule = true};
}

// A key that nothing reads. It has no member, but a value that it stands for when it is not given.
Key unread_key(const std::string& path, UnreadValue usual, std::string meaning, Limits limits = {},
               std::vector<std::string> aliases = {}) {
  const auto field = [path](Config& c) {
    return std::visit([](auto& value) -> Field { return &value; }, c.unread.at(path));
  };
  return {path, field, std::move(meaning), std::move(limits), std::move(aliases), std::move(usual)};
}

std::vector<Key> first_rows() {
  return {
      {FIELD(train_batch_size), "samples of one optimizer step over all ranks; derived when unset", at_least(1)},
      {FIELD(train_micro_batch_size_per_gpu), "samples of one rank in one forward; derived when unset", at_least(1)},
      {FIELD(gradient_accumulation_steps), "micro-batches of one optimizer step; derived when unset", at_least(1)},
      {FIELD(optimizer.type),
       "Adam, AdamW, SGD, Adagrad, Lion (native), Lamb, Muon, Adafactor, in any letter case; else a class of "
       "torch.optim, from C++ some"},
      {FIELD(optimizer.params), "arguments of the optimizer, see \"Optimizers\""},
      unread_key("optimizer.legacy_fusion", false, "an older fused implementation"),
      {FIELD(scheduler.type),
       "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest; else a class of "
       "torch.optim.lr_scheduler, from C++ some"},
      {FIELD(scheduler.params), "arguments of the schedule, see docs/schedules.md"},
      {FIELD(gradient_clipping),
       "largest global L2 norm of the gradient; 0 turns clipping off. torch's own function sees no gradients in stages "
       "1 to 3: "
       "[training.md](training.md)",
       at_least(0)},
      {FIELD(managed_gradient_accumulation), "false: every step() is a boundary and the user counts micro-batches"},
      {FIELD(prescale_gradients), "divide before the sum instead of after it"},
      {FIELD(gradient_predivide_factor), "part of the division done before the sum", above(0)},
      {"gradient_allreduce_op", ENUM_FIELD(gradient_allreduce_op, GradientOp, "mean", "sum"),
       "mean or sum over the data-parallel ranks"},
      unread_key("sparse_gradients", false, "gradients of nn.Embedding(sparse=True) travel as rows and values"),
      {FIELD(communication_data_type), "dtype that travels in reductions; unset: the dtype of the gradients"},
      {FIELD(seq_parallel_communication_data_type), "the same under sequence parallelism"},
      {FIELD(bf16.enabled), "bfloat16 parameters and gradients with an fp32 master"},
      unread_key("bf16.immediate_grad_update", false,
                 "no effect: gradients are always added as soon as they are there"),
      {FIELD(bf16.check_grad_overflow), "skip a step whose gradients hold inf or NaN"},
      {FIELD(bf16.bf16_master_weights_and_grads),
       "bfloat16 master weights and gradients",
       any(),
       {"bf16_master_weights_and_gradients"}},
      {FIELD(bf16.bf16_optimizer_states), "bfloat16 optimizer states"},
      {FIELD(fp16.enabled), "float16 parameters and gradients with a loss scale"},
      {FIELD(fp16.auto_cast), "cast inputs of forward to float16"},
      {FIELD(fp16.loss_scale), "fixed loss scale; 0: dynamic", Limits{.min = 0, .no_bool = true}},
      {FIELD(fp16.initial_scale_power), "dynamic scale starts at 2 to this power", at_least(0)},
      {FIELD(fp16.loss_scale_window), "good steps before the scale doubles", by_rule()},
      {FIELD(fp16.hysteresis), "overflows before the scale halves"},
      {FIELD(fp16.consecutive_hysteresis), "a good step refills the hysteresis"},
      {FIELD(fp16.min_loss_scale), "smallest dynamic scale", by_rule()},
      {FIELD(fp16.fp16_master_weights_and_grads),
       "float16 master weights and gradients",
       any(),
       {"fp16_master_weights_and_gradients"}},
      {FIELD(torch_autocast.enabled), "run forward inside torch.autocast"},
      {FIELD(torch_autocast.dtype), "dtype of autocast; unset: bf16"},
      {FIELD(torch_autocast.lower_precision_safe_modules),
       "classes whose parameters travel in that dtype, as dotted names"},
      {FIELD(data_types.grad_accum_dtype), "dtype in which gradients accumulate and are reduced"},
      {FIELD(data_types.param_dtype), "may only restate the dtype of the precision mode"},
      {FIELD(data_types.buffer_dtype), "dtype of module buffers; unset: kept as they are"},
      {FIELD(data_types.keep_in_fp32_modules),
       "in 16-bit modes: buffers that stay fp32, by patterns anywhere in their names (* is anything); unset: what a "
       "model "
       "of Transformers says of itself"},
  };
}

std::vector<Key> zero_rows() {
  return {
      {FIELD(zero_optimization.stage), "0 off, 1 optimizer states, 2 and gradients, 3 and parameters are sharded",
       between(0, 3)},
      unread_key("zero_optimization.contiguous_gradients", true, "gradients are copied into one buffer"),
      {FIELD(zero_optimization.reduce_scatter),
       "false where Muon, prescale_gradients or gradient_predivide_factor need it; gradients travel the same way"},
      {FIELD(zero_optimization.reduce_bucket_size), "elements of one reduction", at_least(0)},
      unread_key("zero_optimization.use_multi_rank_bucket_allreduce", true, "one reduction for the parts of all ranks"),
      unread_key("zero_optimization.allgather_partitions", true, "gather updated parameters; false: broadcast them"),
      {FIELD(zero_optimization.allgather_bucket_size), "elements of one gather; even in stages 1 and 2", at_least(0)},
      {FIELD(zero_optimization.overlap_comm), "reduce while the backward goes on; unset: yes"},
      unread_key("zero_optimization.compute_grad_norm", true, "compute the norm of the gradients"),
      {FIELD(zero_optimization.load_from_fp32_weights), "loading takes the master weights of the checkpoint"},
      unread_key("zero_optimization.elastic_checkpoint", false,
                 "no effect: Tessera loads a checkpoint at any number of ranks"),
      {"zero_optimization.offload_optimizer.device",
       ENUM_FIELD(zero_optimization.offload_optimizer.device, OffloadDevice, "none", "cpu", "nvme"),
       "where optimizer states live"},
      {FIELD(zero_optimization.offload_optimizer.nvme_path), "folder for device nvme"},
      {FIELD(zero_optimization.offload_optimizer.buffer_count),
       "buffers of a tile for NVMe transfers, at least; see docs/offload.md", at_least(0)},
      {FIELD(zero_optimization.offload_optimizer.pin_memory),
       "page-locked host memory for what goes between device and host"},
      unread_key("zero_optimization.offload_optimizer.pipeline_read", false,
                 "no effect: reads are always ahead of the update"),
      unread_key("zero_optimization.offload_optimizer.pipeline_write", false,
                 "no effect: writes are always behind the update"),
      unread_key("zero_optimization.offload_optimizer.fast_init", false, "another way to write the first states"),
      {FIELD(zero_optimization.offload_optimizer.ratio),
       "share of the states that live there, by units; auto: those that do not fit on the device",
       Limits{.min = 0, .max = 1, .takes_auto = true}},
      {FIELD(zero_optimization.offload_optimizer.super_offload), "update on the host while the next step goes on"},
      unread_key("zero_optimization.offload_optimizer.cpuadam_cores_perc", 0.8, "share of the cores for the update",
                 between(0, 1)),
      {"zero_optimization.offload_param.device",
       ENUM_FIELD(zero_optimization.offload_param.device, OffloadDevice, "none", "cpu", "nvme"),
       "where parameters live in stage 3"},
      {FIELD(zero_optimization.offload_param.nvme_path), "folder for device nvme"},
      {FIELD(zero_optimization.offload_param.buffer_count),
       "nvme: units that are read ahead of their gathers, at most; see docs/offload.md", at_least(0)},
      {FIELD(zero_optimization.offload_param.buffer_size),
       "nvme: elements of each of them that are, on average, at most", at_least(0)},
      {FIELD(zero_optimization.offload_param.max_in_cpu),
       "nvme: elements of a rank that stay in host memory, the first ones of the model", at_least(0)},
      {FIELD(zero_optimization.offload_param.pin_memory), "page-locked host memory, of a model on a device"},
      unread_key("zero_optimization.sub_group_size", int64_t{1'000'000'000}, "elements of one update tile in stage 3",
                 at_least(0)),
      {FIELD(zero_optimization.stage3_prefetch_bucket_size),
       "0: nothing is gathered ahead; else the next unit is",
       at_least(0),
       {"prefetch_bucket_size"}},
      {FIELD(zero_optimization.stage3_param_persistence_threshold),
       "parameters up to this size stay gathered",
       at_least(0),
       {"param_persistence_threshold"}},
      {FIELD(zero_optimization.stage3_model_persistence_threshold),
       "cap on all that stay gathered",
       at_least(0),
       {"model_persistence_threshold"}},
      {FIELD(zero_optimization.stage3_max_live_parameters),
       "elements gathered at one time",
       at_least(0),
       {"max_live_parameters"}},
      {FIELD(zero_optimization.stage3_max_reuse_distance),
       "keep gathered what is used again within this many elements",
       at_least(0),
       {"max_reuse_distance"}},
      {FIELD(zero_optimization.stage3_gather_16bit_weights_on_model_save),
       "allow the 16-bit export in stage 3",
       any(),
       {"gather_16bit_weights_on_model_save"}},
      {FIELD(zero_optimization.stage3_module_granularity_threshold),
       "modules with fewer elements of parameters for each module inside are leaves; 0: none",
       at_least(0),
       {"module_granularity_threshold"}},
      unread_key("zero_optimization.stage3_use_all_reduce_for_fetch_params", false, "fetch parameters by an all-reduce",
                 any(), {"use_all_reduce_for_fetch_params"}),
      unread_key("zero_optimization.stage3_allgather_sequential", false, "gather parameters one by one", any(),
                 {"allgather_sequential"}),
      {FIELD(zero_optimization.ignore_unused_parameters),
       "false: with optimizer offload at stages 1 and 2, unused parameters are an error in step()"},
      {FIELD(zero_optimization.legacy_stage1), "must be false"},
      unread_key("zero_optimization.round_robin_gradients", false,
                 "no effect: with offload every rank always copies its own part of the gradients only"),
      unread_key("zero_optimization.parameter_alignment", false, "no effect: parameters are always aligned"),
      {FIELD(zero_optimization.zero_hpz_partition_size), "ranks of the secondary shard group", at_least(1)},
      {FIELD(zero_optimization.zero_quantized_weights), "quantized gathers"},
      {FIELD(zero_optimization.zero_quantized_nontrainable_weights), "quantized gathers of frozen parameters"},
      {FIELD(zero_optimization.zero_quantized_gradients), "quantized reductions"},
      {FIELD(zero_optimization.mics_shard_size), "ranks of one shard group; -1: all", at_least(-1)},
      unread_key("zero_optimization.mics_hierarchical_params_gather", false, "gather in two levels"),
      unread_key(
          "zero_optimization.memory_efficient_linear", true,
          "no effect: Linear is torch's own, whose weight in stage 3 goes after the forward and comes back for the "
          "backward"),
      unread_key("zero_optimization.pipeline_loading_checkpoint", false, "ranks load a checkpoint one after the other"),
      unread_key("zero_optimization.override_module_apply", true, "gather one module at a time in Module.apply"),
      unread_key("zero_optimization.log_trace_cache_warnings", false,
                 "log when modules run in another order than before"),
      unread_key("zero_optimization.enable_sanity_checks", false, "extra checks while parameters are gathered"),
      unread_key("zero_optimization.save_muon_momentum_buffer_in_memory", false,
                 "the momentum of Muon stays in memory"),
      {FIELD(zero_optimization.leaf_module.classes), "classes gathered as one unit; a text is a list of one",
       one_is_list()},
      {FIELD(zero_optimization.leaf_module.names), "module paths gathered as one unit", one_is_list()},
      {FIELD(zero_optimization.leaf_module.name_suffixes), "ends of module paths gathered as one unit", one_is_list()},
  };
}

std::vector<Key> later_rows() {
  return {
      {FIELD(zero_allow_untested_optimizer),
       "allow optimizers without a native rule in stages 1 to 3 and beside tensor parallelism"},
      {FIELD(zero_force_ds_cpu_optimizer),
       "read by the deepspeed package: an optimizer of one's own with offload is DeepSpeedCPUAdam or DeepSpeedCPULion"},
      {FIELD(tensor_parallel.autotp_size), "ranks of a tensor-parallel group; 0 and 1: off", at_least(0)},
      {FIELD(tensor_parallel.preset_model), "named set of partition rules",
       one_of({"llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"})},
      {FIELD(tensor_parallel.partition_config), "partition rules"},
      {FIELD(tensor_parallel.tp.tp_size), "1 or autotp_size", at_least(1)},
      {FIELD(tensor_parallel.tp.tp_grain_size), "unit of uneven cuts", at_least(1)},
      {FIELD(tensor_parallel.tp.mpu), "only from Python", null_only()},
      {FIELD(tensor_parallel.tp.tp_group), "only from Python", null_only()},
      {FIELD(tensor_parallel.dtype), "dtype expected by the tensor-parallel set-up"},
      {FIELD(tensor_parallel.tp_overlap_comm), "overlap the backward reduction"},
      {FIELD(tensor_parallel.vocab_parallel_lm_head), "cut the language-model head over the vocabulary"},
      unread_key("tensor_parallel.vocab_parallel_ce_backend", std::string("torch"),
                 "implementation of the loss over a cut vocabulary", one_of({"torch", "liger"})),
      unread_key("tensor_parallel.injection_policy_tuple", Value(), "layers to cut, by an older name"),
      unread_key("tensor_parallel.keep_module_on_host", false, "cut the model in host memory"),
      unread_key("tensor_parallel.replace_with_kernel_inject", false, "replace modules by fused ones", any(),
                 {"kernel_inject"}),
      unread_key("data_parallel_size", int64_t{0}, "ranks of the data-parallel axis; 0: from the world size",
                 at_least(0)),
      {FIELD(sequence_parallel_size), "ranks of the sequence-parallel axis", at_least(1)},
      {FIELD(steps_per_print),
       "shows where the training is: on a terminal in one line, else by a line every so many optimizer steps; unset or "
       "infinite: not",
       Limits{.min = 1, .inf_unsets = true}},
      {FIELD(wall_clock_breakdown),
       "log the time of forward, backward, reduce, gather and step; device work is waited for"},
      {FIELD(memory_breakdown),
       "log the bytes that the engine and the device hold, every steps_per_print steps (unset: every step)"},
      {FIELD(dump_state), "log the configuration and the param groups when the engine is built"},
      {FIELD(log_level), "smallest level that is logged", one_of({"debug", "info", "warning", "error", "critical"})},
      {FIELD(dataloader_drop_last), "the data loader drops the last incomplete batch"},
      {FIELD(graph_harvesting), "capture and replay device graphs"},
      {FIELD(disable_python_gc), "no collection of Python's cycles while an engine lives"},
      {"checkpoint.tag_validation", ENUM_FIELD(checkpoint.tag_validation, TagValidation, "ignore", "warn", "fail"),
       "what to do when ranks save under different tags"},
      {"checkpoint.format", ENUM_FIELD(checkpoint.format, CheckpointFormat, "tessera", "deepspeed"),
       "whose files save_checkpoint writes; loads read both"},
      {FIELD(checkpoint.load_universal), "a load without a tag takes the one that latest_universal names"},
      unread_key("checkpoint.use_node_local_storage", false, "every node writes to its own disk"),
      {FIELD(checkpoint.asynchronous), "save_checkpoint returns once the states are copied; a thread writes them"},
      {FIELD(checkpoint.keep_last), "checkpoints that stay in the folder when a new one is complete; 0: all",
       at_least(0)},
      {FIELD(checkpoint.random_state), "each rank's random generators are saved and restored"},
      unread_key("checkpoint.parallel_write.pipeline_stage", false,
                 "data-parallel ranks share the writing of a stage's layers"),
      unread_key("checkpoint.checkpoint_serialization", true, "files are zip archives"),
      unread_key("checkpoint.writer", Value(), "who writes the files"),
      unread_key("checkpoint.async_io", Value(), "settings of asynchronous writes"),
      {FIELD(pipeline.schedule), "order of a pipeline's forwards and backwards, see docs/pipeline.md",
       one_of({"1f1b", "gpipe", "interleaved"})},
      {FIELD(pipeline.activation_checkpoint_interval),
       "layers of a pipeline between two saved activations, where PipelineModule does not say; 0: all are saved",
       at_least(0)},
      unread_key("pipeline.use_reentrant", false, "recompute layers by torch's reentrant checkpoint"),
      unread_key("pipeline.stages", Value(), "number of stages"),
      unread_key("pipeline.partition", Value(), "how layers are dealt to stages"),
      unread_key("pipeline.seed_layers", false, "layers have seeds of their own"),
      unread_key("pipeline.pipe_partitioned", true, "tensor-parallel ranks send slices of activations"),
      unread_key("pipeline.grad_partitioned", true, "tensor-parallel ranks send slices of gradients"),
      {FIELD(activation_checkpointing.partition_activations),
       "engine.recompute keeps a slice of its inputs on each tensor-parallel rank"},
      unread_key("activation_checkpointing.contiguous_memory_optimization", false, "inputs are kept in one buffer"),
      {FIELD(activation_checkpointing.cpu_checkpointing), "engine.recompute keeps its inputs in host memory"},
      unread_key("activation_checkpointing.number_checkpoints", std::optional<int64_t>(),
                 "checkpointed layers that the buffer is for", at_least(1)),
      {FIELD(activation_checkpointing.synchronize_checkpoint_boundary),
       "engine.recompute waits for the device before and after"},
      {FIELD(activation_checkpointing.profile), "engine.recompute names its parts in torch.profiler"},
      {FIELD(flops_profiler.enabled), "count operations of one step"},
      {FIELD(flops_profiler.recompute_fwd_factor), "share of forward that is recomputed", at_least(0)},
      {FIELD(flops_profiler.profile_step), "step to profile", at_least(0)},
      {FIELD(flops_profiler.module_depth), "depth of the report; -1: all", at_least(-1)},
      {FIELD(flops_profiler.top_modules), "modules named per level", at_least(0)},
      {FIELD(flops_profiler.detailed), "long report"},
      {FIELD(flops_profiler.output_file), "file of the report"},
      {FIELD(tensorboard.enabled), "write TensorBoard events"},
      {FIELD(tensorboard.output_path), "folder"},
      {FIELD(tensorboard.job_name), "name of the run"},
      {FIELD(csv_monitor.enabled), "write CSV files"},
      {FIELD(csv_monitor.output_path), "folder"},
      {FIELD(csv_monitor.job_name), "name of the run"},
      {FIELD(wandb.enabled), "log to Weights & Biases"},
      {FIELD(wandb.group), "group of the run"},
      {FIELD(wandb.team), "team"},
      {FIELD(wandb.project), "project"},
      {FIELD(comet.enabled), "log to Comet"},
      {FIELD(comet.samples_log_interval), "samples between two points", at_least(1)},
      {FIELD(comet.project), "project"},
      {FIELD(comet.workspace), "workspace"},
      {FIELD(comet.api_key), "key of the account"},
      {FIELD(comet.experiment_name), "name of the run"},
      {FIELD(comet.experiment_key), "key of the run"},
      {FIELD(comet.online), "log online"},
      {FIELD(comet.mode), "mode of the run"},
      {FIELD(comms_logger.enabled), "log collectives"},
      {FIELD(comms_logger.verbose), "log each call"},
      {FIELD(comms_logger.prof_all), "log all operations"},
      {FIELD(comms_logger.debug), "log callers"},
      {FIELD(comms_logger.prof_ops), "operations to log"},
      unread_key("timers.throughput.enabled", true, "log samples per second"),
      unread_key("timers.throughput.synchronized", true, "wait for the device for it"),
      {FIELD(compile.deepcompile), "compiler passes over the engine"},
      unread_key("compile.autoep_non_moe", false, "part of deepcompile"),
      unread_key("compile.free_activation", false, "part of deepcompile"),
      unread_key("compile.free_activation_threshold", int64_t{10'485'760}, "part of deepcompile", at_least(0)),
      unread_key("compile.offload_activation", false, "part of deepcompile"),
      unread_key("compile.offload_activation_pin_memory", true, "part of deepcompile"),
      unread_key("compile.offload_opt_states", false, "part of deepcompile"),
      unread_key("compile.double_buffer", true, "part of deepcompile"),
      unread_key("compile.symmetric_memory", false, "part of deepcompile"),
      unread_key("compile.debug_log", false, "part of deepcompile"),
      unread_key("compile.offload_parameters", false, "part of deepcompile"),
      unread_key("compile.sync_before_reduce", false, "part of deepcompile"),
      unread_key("compile.sync_after_reduce", false, "part of deepcompile"),
      unread_key("compile.sync_before_allgather", false, "part of deepcompile"),
      unread_key("compile.sync_after_allgather", false, "part of deepcompile"),
      unread_key("compile.keep_int_input_tensors", true, "part of deepcompile"),
      unread_key("compile.keep_all_input_tensors", false, "part of deepcompile"),
      unread_key("compile.passes", std::vector<std::string>(), "part of deepcompile"),
      {FIELD(elasticity.enabled), "choose the batch triple for a range of world sizes"},
      {FIELD(elasticity.max_train_batch_size), "largest train_batch_size", at_least(1)},
      {FIELD(elasticity.micro_batch_sizes), "micro-batch sizes to choose from"},
      {FIELD(elasticity.min_gpus), "smallest world", at_least(1)},
      {FIELD(elasticity.max_gpus), "largest world", at_least(1)},
      {FIELD(elasticity.num_gpus_per_node), "devices of a node", at_least(1)},
      {FIELD(elasticity.model_parallel_size), "ranks of one model", at_least(1)},
      unread_key("elasticity.min_time", int64_t{0}, "minutes between two changes", at_least(0)),
      {FIELD(elasticity.prefer_larger_batch), "of two choices take the larger batch"},
      {FIELD(elasticity.ignore_non_elastic_batch_info), "ignore the batch triple"},
      {FIELD(elasticity.version), "version of the rules", at_least(0)},
      {FIELD(tessera.min_unit_elements), "smaller neighbouring units are merged into one collective", at_least(0)},
      {FIELD(tessera.state_bytes),
       "bytes a parameter of weight, gradient, master and moments; chooses the precision mode", at_least(1)},
      {FIELD(tessera.rounding),
       "rounding into 16-bit masters, moments and accumulated gradients; unset: nearest for gradients, else stochastic",
       one_of({"nearest", "stochastic"})},
      {FIELD(tessera.seed), "seed of stochastic rounding", at_least(0)},
      {FIELD(tessera.broadcast_buffers), "buffers of the module start with rank 0's values, as parameters do"},
      {FIELD(tessera.shared_parameters),
       "CPU ranks of one host keep one copy of the compute parameters, see docs/shared_parameters.md"},
      {FIELD(tessera.update_in_backward),
       "units are updated while the backward goes on and no gradient is kept, see docs/update_in_backward.md"},
      {FIELD(tessera.update_runs_on),
       "the update of states that live elsewhere goes on beside the next forward, after step() or from the backward "
       "on, see docs/offload.md"},
      {FIELD(tessera.clip),
       "what gradient_clipping limits: the norm of all gradients; with update_in_backward that of each unit's, or all "
       "by the norm of the step before; unset: global",
       one_of({"global", "unit", "previous"})},
      {FIELD(tessera.clip_by_unit), "the same as clip \"unit\""},
      {FIELD(tessera.device_share),
       "of states of 32 bits that live elsewhere, the share that passes through the device and is updated there, by "
       "units; "
       "auto: what is measured to be fastest, see docs/offload.md",
       Limits{.min = 0, .max = 1, .takes_auto = true}},
      {FIELD(tessera.device_reserve),
       "with offload_optimizer.ratio auto: the share of the device's memory that is left for activations",
       between(0, 1)},
      {FIELD(tessera.sequence_parallel_norms),
       "with autotp_size: activations between blocks are cut along the sequence, see docs/tensor_parallel.md"},
      {FIELD(tessera.json_lines),
       "a file to which the first rank appends the numbers of every step, and warnings, as lines of JSON; "
       "`tessera page` draws it, see docs/watching.md"},
  };
}

#undef FIELD
#undef ENUM_FIELD

}  // namespace

const std::vector<Key>& keys() {
  static const std::vector<Key> all = [] {
    std::vector<Key> rows = first_rows();
    for (auto part : {zero_rows(), later_rows()}) {
      rows.insert(rows.end(), part.begin(), part.end());
    }
    return rows;
  }();
  return all;
}

std::map<std::string, UnreadValue> unread_values() {
  std::map<std::string, UnreadValue> values;
  for (const Key& key : keys())
    if (key.unread) values.emplace(key.path, *key.unread);
  return values;
}

const std::vector<Legacy>& legacy_keys() {
  static const std::vector<Legacy> all{
      {"zero_optimization.cpu_offload", "deprecated; true: offload_optimizer.device cpu"},
      {"zero_optimization.cpu_offload_param", "deprecated; true: offload_param.device cpu"},
      {"zero_optimization.cpu_offload_use_pin_memory", "deprecated and ignored; pin_memory of the offload sections"},
      {"zero_optimization.stage3_gather_fp16_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"},
      {"zero_optimization.zeropp_loco_param", "refused unless null"},
      {"zero_optimization.zenflow", "refused unless null"},
  };
  return all;
}

const std::vector<std::string>& foreign_names() {
  static const std::vector<std::string> all{"aio",
                                            "amp",
                                            "autotuning",
                                            "compression_training",
                                            "data_efficiency",
                                            "curriculum_learning",
                                            "eigenvalue",
                                            "expert_parallel",
                                            "hybrid_engine",
                                            "nebula",
                                            "progressive_layer_drop",
                                            "quantize_training",
                                            "sparse_attention",
                                            "weight_quantization",
                                            "zenflow"};
  return all;
}

}  // namespace tessera::config
