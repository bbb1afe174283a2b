#include "tessera/config/served.h"

#include <algorithm>
#include <map>

#include "tessera/base/error.h"
#include "tessera/config/lookup.h"
#include "tessera/config/precision.h"
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

// Moments in the dtype of 16-bit masters, which no key of the section asks for. (Those of fp32 masters are fp32.)
bool unserved_states(const Config& c) {
  const auto found = c.optimizer.params.find("fp32_optimizer_states");
  const bool off = found != c.optimizer.params.end() && (found->second == Value(false) || found->second == Value(0));
  const bool low = (c.bf16.enabled && c.bf16.bf16_master_weights_and_grads && !c.bf16.bf16_optimizer_states) ||
                   (c.fp16.enabled && c.fp16.fp16_master_weights_and_grads);
  return off && low;
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
      {"data_types.grad_accum_dtype", "other than fp32 and the dtype of the parameters",
       [](C c) {
         const auto dtype = c.data_types.grad_accum_dtype.value_or(c10::ScalarType::Float);
         return dtype != c10::ScalarType::Float && dtype != precision(c).param;
       }},
      {"optimizer.type", "MuAdam, MuAdamW, MuSGD, OneBit*, ZeroOneAdam", unserved_type},
      {"optimizer.params", "fp32_optimizer_states false beside 16-bit masters without bf16_optimizer_states",
       unserved_states},
      {"graph_harvesting", "true", [](C c) { return c.graph_harvesting; }},
      {"compile.deepcompile", "true", [](C c) { return c.compile.deepcompile; }},
  };
  return all;
}

const std::vector<Unread>& unread() {
  static const std::vector<Unread> all{
      {"data_parallel_size", "the process group says how many ranks there are"},
      {"zero_optimization.sub_group_size", "the update is one pass, with offload in tiles of their own size"},
      {"zero_optimization.offload_optimizer.cpuadam_cores_perc", "the update takes torch.get_num_threads() threads"},
      {"zero_optimization.mics_hierarchical_params_gather", "the gather has one level"},
      {"zero_optimization.override_module_apply", "wrap Module.apply in GatheredParameters"},
      {"zero_optimization.enable_sanity_checks", "what can be checked is checked"},
      {"checkpoint.use_node_local_storage", "give such a folder yourself"},
      {"pipeline.stages", "PipelineModule(num_stages=...)"},
      {"pipeline.partition", "PipelineModule(partition_method=...)"},
      {"pipeline.seed_layers", "PipelineModule(seed_layers=...)"},
  };
  return all;
}

const std::vector<Refusal>& python_only() {
  using C = const Config&;
  static const std::vector<Refusal> all{
      {"tensorboard.enabled", "true", [](C c) { return c.tensorboard.enabled; }},
      {"csv_monitor.enabled", "true", [](C c) { return c.csv_monitor.enabled; }},
      {"wandb.enabled", "true", [](C c) { return c.wandb.enabled; }},
      {"comet.enabled", "true", [](C c) { return c.comet.enabled; }},
      {"flops_profiler.enabled", "true", [](C c) { return c.flops_profiler.enabled; }},
      {"comms_logger.enabled", "true", [](C c) { return c.comms_logger.enabled; }},
      {"activation_checkpointing.partition_activations", "true",
       [](C c) { return c.activation_checkpointing.partition_activations; }},
      {"tessera.sequence_parallel_norms", "true", [](C c) { return c.tessera.sequence_parallel_norms; }},
      {"elasticity.enabled", "true", [](C c) { return c.elasticity.enabled; }},
  };
  return all;
}

const std::vector<Refusal>& python_reads() {
  using C = const Config&;
  static const std::vector<Refusal> all{
      {"memory_breakdown", "true", [](C c) { return c.memory_breakdown; }},
      {"dump_state", "true", [](C c) { return c.dump_state; }},
      {"zero_optimization.ignore_unused_parameters", "false",
       [](C c) { return !c.zero_optimization.ignore_unused_parameters; }},
      {"zero_force_ds_cpu_optimizer", "false", [](C c) { return !c.zero_force_ds_cpu_optimizer; }},
      {"log_level", "any", [](C c) { return c.log_level.has_value(); }},
      {"activation_checkpointing.cpu_checkpointing", "true",
       [](C c) { return c.activation_checkpointing.cpu_checkpointing; }},
  };
  return all;
}

void warn_of_unread(const Config& config, Report& report) {
  for (const Unread& row : unread()) {
    if (config.given.contains(row.key) && config.get(row.key) != Config{}.get(row.key)) {
      report.warning(row.key, std::string("has no effect in this version; ") + row.instead);
    }
  }
}

namespace {

std::vector<std::string> asked_for(const std::vector<Refusal>& rows, const Config& config) {
  std::vector<std::string> lines;
  for (const Refusal& row : rows) {
    if (row.refused(config)) {
      lines.push_back(std::string(row.key) + " (" + row.when + ")");
    }
  }
  return lines;
}

}  // namespace

std::vector<std::string> check_cpp_serves(const Config& config) {
  const std::vector<std::string> lines = asked_for(python_only(), config);
  TESSERA_CHECK_BUILT(lines.empty(), "config",
                      "the configuration asks for what only the Python front end serves; leave it out:\n  ",
                      join(lines, "\n  "));
  std::vector<std::string> warnings = asked_for(python_reads(), config);
  for (std::string& line : warnings)
    line += ": has no effect in C++";
  return warnings;
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

// Of a key: the row of state_table() that it belongs to, and what is to be said of it there.
std::pair<std::string, std::string> state_of(const Key& key) {
  const auto in = [&](const auto& rows) {
    return std::find_if(rows.begin(), rows.end(), [&](const auto& row) { return key.path == row.key; });
  };
  if (const auto row = in(refusals()); row != refusals().end()) return {"served but for these values", row->when};
  if (in(unread()) != unread().end()) return {"no effect; another value than the default is a warning", ""};
  if (in(python_only()) != python_only().end() || in(python_reads()) != python_reads().end())
    return {"served from Python", ""};
  const bool idle = key.meaning.find("no effect") != std::string::npos ||
                    key.meaning.find("without effect") != std::string::npos ||
                    key.meaning.starts_with("part of deepcompile");
  return {idle ? "no effect: so it is always, or it chooses an implementation elsewhere" : "served", ""};
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
