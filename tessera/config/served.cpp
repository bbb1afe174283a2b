#include "tessera/config/served.h"

#include <algorithm>
#include <map>

#include "tessera/base/error.h"
#include "tessera/config/lookup.h"
#include "tessera/config/precision.h"
#include "tessera/config/rules.h"
#include "tessera/config/text.h"

namespace tessera::config {
namespace {

bool unserved_type(const Config& c) {
  const std::string type = lower(c.optimizer.type);
  for (const char* prefix : {"onebit", "zeroone", "muadam", "musgd"}) {
    if (type.starts_with(prefix)) {
      return true;
    }
  }
  return false;
}

// Whether moments are in the dtype of 16-bit masters, which no key of the section asks for. (Those of fp32 masters are fp32.)
bool unserved_states(const Config& c) {
  const auto found = c.optimizer.params.find("fp32_optimizer_states");
  const bool off = found != c.optimizer.params.end() && (found->second == Value(false) || found->second == Value(0));
  const bool low = (c.bf16.enabled && c.bf16.bf16_master_weights_and_grads && !c.bf16.bf16_optimizer_states) ||
                   (c.fp16.enabled && c.fp16.fp16_master_weights_and_grads);
  return off && low;
}

bool per_head(const Config& c) {
  const auto found = c.optimizer.params.find("per_head_muon");
  return found != c.optimizer.params.end() && (found->second == Value(true) || found->second == Value(1));
}

}  // namespace

const std::vector<Refusal>& refusals() {
  using C = const Config&;
  static const std::vector<Refusal> all{
      {"zero_optimization.offload_optimizer.super_offload", "true with device cpu or nvme",
       [](C c) {
         const OffloadOptimizer& offload = c.zero_optimization.offload_optimizer;
         return offload.device != OffloadDevice::None && offload.super_offload;
       }},
      {"zero_optimization.zero_hpz_partition_size", "> 1",
       [](C c) { return c.zero_optimization.zero_hpz_partition_size > 1; }},
      {"zero_optimization.zero_quantized_weights", "true",
       [](C c) { return c.zero_optimization.zero_quantized_weights; }},
      {"zero_optimization.zero_quantized_nontrainable_weights", "true",
       [](C c) { return c.zero_optimization.zero_quantized_nontrainable_weights; }},
      {"zero_optimization.zero_quantized_gradients", "true",
       [](C c) { return c.zero_optimization.zero_quantized_gradients; }},
      {"data_types.grad_accum_dtype", "at stage 0 other than fp32 and the dtype of the parameters",
       [](C c) {
         const auto dtype = c.data_types.grad_accum_dtype.value_or(c10::ScalarType::Float);
         return c.zero_optimization.stage == 0 && dtype != c10::ScalarType::Float && dtype != precision(c).param;
       }},
      {"optimizer.type", "MuAdam, MuAdamW, MuSGD, OneBit*, ZeroOneAdam", unserved_type},
      {"optimizer.params", "fp32_optimizer_states false beside 16-bit masters without bf16_optimizer_states",
       unserved_states},
      {"optimizer.params", "per_head_muon true", per_head},
      {"graph_harvesting", "true", [](C c) { return c.graph_harvesting; }},
      {"disable_python_gc", "true: gc.disable() in the program", [](C c) { return c.disable_python_gc; }},
      {"compile.deepcompile", "true", [](C c) { return c.compile.deepcompile; }},
  };
  return all;
}

const std::vector<Unread>& unread() {
  static const std::vector<Unread> all{
      {"data_parallel_size", "the process group says how many ranks there are"},
      {"optimizer.legacy_fusion", "native optimizers are one fused pass"},
      {"prescale_gradients", "sum and division are one operation"},
      {"gradient_predivide_factor", "sum and division are one operation"},
      {"sparse_gradients", "sparse gradients are always taken, and travel dense"},
      {"zero_optimization.contiguous_gradients", "gradients are always contiguous"},
      {"zero_optimization.use_multi_rank_bucket_allreduce", "one reduction always has the parts of all ranks"},
      {"zero_optimization.allgather_partitions", "updated parameters are always gathered"},
      {"zero_optimization.allgather_bucket_size",
       "a gather is a unit, whose size tessera.min_unit_elements and reduce_bucket_size say"},
      {"zero_optimization.compute_grad_norm", "the norm is always computed"},
      {"zero_optimization.sub_group_size", "the update is one pass, with offload in tiles of their own size"},
      {"zero_optimization.offload_optimizer.cpuadam_cores_perc",
       "the update takes as many threads as torch's operators do"},
      {"zero_optimization.offload_optimizer.fast_init", "first states are always written tile by tile"},
      {"zero_optimization.stage3_use_all_reduce_for_fetch_params", "parameters are fetched by an all-gather"},
      {"zero_optimization.stage3_allgather_sequential", "a unit is gathered at once"},
      {"zero_optimization.mics_hierarchical_params_gather", "the gather has one level"},
      {"zero_optimization.pipeline_loading_checkpoint", "ranks load at the same time, each its own part"},
      {"zero_optimization.override_module_apply", "call apply() of a module inside GatheredParameters"},
      {"zero_optimization.log_trace_cache_warnings", "modules may run in any order; it is not logged"},
      {"zero_optimization.enable_sanity_checks", "what can be checked is checked"},
      {"zero_optimization.save_muon_momentum_buffer_in_memory", "it lives where the other states do"},
      {"tensor_parallel.vocab_parallel_ce_backend", "the loss over a cut vocabulary is Tessera's own"},
      {"tensor_parallel.injection_policy_tuple", "tensor_parallel.partition_config"},
      {"tensor_parallel.keep_module_on_host", "the model moves to the engine's device, then it is cut"},
      {"tensor_parallel.replace_with_kernel_inject", "modules keep their own kernels"},
      {"checkpoint.use_node_local_storage", "give such a folder yourself"},
      {"checkpoint.parallel_write.pipeline_stage", "all ranks always share the writing of Tessera's files"},
      {"checkpoint.checkpoint_serialization", "Tessera's files are raw values, those of format deepspeed zip archives"},
      {"checkpoint.writer", "checkpoint.asynchronous"},
      {"checkpoint.async_io", "checkpoint.asynchronous"},
      {"pipeline.stages", "the program says it: num_stages of PipelineModule, in C++ environment_stages()"},
      {"pipeline.partition",
       "the program says it: partition_method of PipelineModule, in C++ PipelineOptions::partition"},
      {"pipeline.seed_layers", "the program says it: seed_layers of PipelineModule, in C++ PipelineOptions::seed"},
      {"pipeline.use_reentrant", "layers are recomputed without a backward inside the backward"},
      {"pipeline.pipe_partitioned", "activations travel whole", false},
      {"pipeline.grad_partitioned", "gradients travel whole", false},
      {"activation_checkpointing.contiguous_memory_optimization", "inputs stay where they are"},
      {"activation_checkpointing.number_checkpoints", "no buffer is set aside for them"},
      {"timers.throughput.enabled", "wall_clock_breakdown logs times", false},
      {"timers.throughput.synchronized", "wall_clock_breakdown waits for the device", false},
      {"compile.*", "it is part of deepcompile, which is not served"},
      {"elasticity.min_time", "ranks come and go when the launcher says so"},
  };
  return all;
}

const std::vector<Refusal>& python_only() {
  using C = const Config&;
  static const std::vector<Refusal> all{
      {"wandb.enabled", "true", [](C c) { return c.wandb.enabled; }},
      {"comet.enabled", "true", [](C c) { return c.comet.enabled; }},
  };
  return all;
}

const std::vector<Refusal>& python_reads() {
  using C = const Config&;
  static const std::vector<Refusal> all{
      {"zero_force_ds_cpu_optimizer", "false", [](C c) { return !c.zero_force_ds_cpu_optimizer; },
       "a client's optimizer runs wherever its states are"},
      {"log_level", "any", [](C c) { return c.log_level.has_value(); },
       "warnings are torch's, lines go to standard error"},
      {"activation_checkpointing.synchronize_checkpoint_boundary", "true",
       [](C c) { return c.activation_checkpointing.synchronize_checkpoint_boundary; },
       "recompute() never waits for the device"},
      {"activation_checkpointing.profile", "true", [](C c) { return c.activation_checkpointing.profile; },
       "times are those of wall_clock_breakdown, and of a profiler of torch"},
      {"tensor_parallel.dtype", "any", [](C c) { return c.tensor_parallel.dtype.has_value(); },
       "slices have the dtype of the parameters, which the precision says"},
  };
  return all;
}

const Unread* unread_row(const std::string& path) {
  const auto& refused = refusals();
  if (std::any_of(refused.begin(), refused.end(), [&](const Refusal& row) { return path == row.key; })) return nullptr;
  const auto found = std::find_if(unread().begin(), unread().end(), [&](const Unread& row) {
    const std::string_view key = row.key;
    return key.ends_with(".*") ? path.starts_with(key.substr(0, key.size() - 1)) : path == key;
  });
  return found == unread().end() ? nullptr : &*found;
}

bool has_effect(const Key& key) {
  return unread_row(key.path) == nullptr && !key.meaning.starts_with("no effect: ");
}

void warn_of_unread(const Config& config, Report& report) {
  const Config defaults;
  for (const Key& key : keys()) {
    const Unread* row = unread_row(key.path);
    if (row == nullptr) continue;
    const Value value = value_of(key, config), usual = value_of(key, defaults);
    const bool set = config.given.contains(key.path) || value != usual;  // a tree filled by hand has no `given`
    if (set && value != (row->done ? Value(*row->done) : usual))
      report.warning(key.path, std::string("has no effect in this version; ") + row->instead);
  }
}

namespace {

std::vector<std::string> asked_for(const std::vector<Refusal>& rows, const Config& config) {
  std::vector<std::string> lines;
  for (const Refusal& row : rows) {
    if (!row.refused(config)) continue;
    lines.push_back(std::string(row.key) + " (" + row.when + ")");
    if (*row.instead != '\0') lines.back() += ": has no effect in C++; " + std::string(row.instead);
  }
  return lines;
}

}  // namespace

std::vector<std::string> check_cpp_serves(const Config& config) {
  const std::vector<std::string> refused = asked_for(python_only(), config);
  TESSERA_CHECK_BUILT(refused.empty(), "config",
                      "the configuration asks for what only the Python front end serves; leave it out:\n  ",
                      join(refused, "\n  "));
  std::vector<std::string> lines = config.warnings;
  Report rules;  // for a tree filled by hand, which nobody has looked at
  check_rules(config, rules);
  for (const std::string& line : rules.warnings())
    if (std::find(lines.begin(), lines.end(), line) == lines.end()) lines.push_back(line);
  for (std::string& line : asked_for(python_reads(), config))
    lines.push_back(std::move(line));
  return lines;
}

void check_served(const Config& config) {
  std::vector<std::string> lines = asked_for(refusals(), config);
  for (const std::string& name : config.foreign_sections) {
    lines.push_back(name + " (switched on)");
  }
  TESSERA_CHECK_BUILT(lines.empty(), "config",
                      "the configuration is valid but asks for what this version does not serve:\n  ",
                      join(lines, "\n  "));
}

namespace {

// Returns the row of state_table() that the key belongs to, and what is to be logged of the key there.
std::pair<std::string, std::string> state_of(const Key& key) {
  const auto in = [&](const auto& rows) {
    return std::find_if(rows.begin(), rows.end(), [&](const auto& row) { return key.path == row.key; });
  };
  if (const auto row = in(refusals()); row != refusals().end()) return {"served but for these values", row->when};
  if (unread_row(key.path) != nullptr) return {"no effect; asking for what is not done is a warning", ""};
  if (key.path == "scheduler.type")  // where_schedule_runs()
    return {"served but for these values", "in C++ LambdaLR, MultiplicativeLR, ReduceLROnPlateau"};
  if (in(python_only()) != python_only().end() || in(python_reads()) != python_reads().end())
    return {"served from Python", ""};
  return {has_effect(key) ? "served" : "no effect: what it asks for is done whatever its value", ""};
}

}  // namespace

std::string state_table() {
  std::map<std::string, std::vector<std::string>> rows;
  for (const Key& key : keys()) {
    const auto [state, values] = state_of(key);
    rows[state].push_back("`" + key.path + "`" + (values.empty() ? "" : " (" + values + ")"));
  }
  for (const std::string& name : foreign_names())
    rows["outside Tessera: refused when switched on (`aio`, `pipeline`: a warning)"].push_back("`" + name + "`");
  std::string out = "| state | keys |\n|---|---|\n";
  for (const auto& [state, members] : rows)
    out += "| " + state + " | " + join(members, ", ") + " |\n";
  return out;
}

}  // namespace tessera::config
