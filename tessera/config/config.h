// Config: a DeepSpeed-style JSON configuration as one plain tree of typed values. Member names are
// the JSON keys.
//
//   auto config = tessera::Config::from_file("config.json");  // or from_json(text): both validate
//   config.validate();                                        // for a tree whose members were set by hand
//   tessera::config::check_served(config);                    // served.h: refuses by name what is not served
//   auto batch = config.resolve_batch(data_parallel_size);
//
// config/resolve.h turns the tree into the option structs of the layers below. docs/config.md lists
// every key.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "tessera/config/sections.h"
#include "tessera/config/value.h"
#include "tessera/config/zero_section.h"

namespace tessera::config {

enum class GradientOp { Mean, Sum };

using UnreadValue =
    std::variant<bool, int64_t, double, std::string, std::optional<int64_t>, std::vector<std::string>, Value>;
std::map<std::string, UnreadValue> unread_values();  // values of a configuration without the keys

// train_batch_size = micro_batch_size * gradient_accumulation_steps * data-parallel size
struct Batch {
  int64_t train_batch_size = 0;
  int64_t micro_batch_size = 0;  // samples of one rank in one forward
  int64_t gradient_accumulation_steps = 0;
};

struct Config {
  // The batch triple: unset ones are derived by resolve_batch().
  std::optional<int64_t> train_batch_size;
  std::optional<int64_t> train_micro_batch_size_per_gpu;
  std::optional<int64_t> gradient_accumulation_steps;

  Optimizer optimizer;
  Scheduler scheduler;

  double gradient_clipping = 1.0;  // largest global L2 norm; 0: off
  bool managed_gradient_accumulation = true;
  bool prescale_gradients = false;
  double gradient_predivide_factor = 1.0;
  GradientOp gradient_allreduce_op = GradientOp::Mean;
  std::optional<c10::ScalarType> communication_data_type;
  c10::ScalarType seq_parallel_communication_data_type = c10::ScalarType::Float;

  Bf16 bf16;
  Fp16 fp16;
  TorchAutocast torch_autocast;
  DataTypes data_types;
  ZeroOptimization zero_optimization;
  bool zero_allow_untested_optimizer = false;
  bool zero_force_ds_cpu_optimizer = true;
  TensorParallel tensor_parallel;
  int64_t sequence_parallel_size = 1;

  std::optional<int64_t> steps_per_print;  // unset: never
  bool wall_clock_breakdown = false;
  bool memory_breakdown = false;
  bool dump_state = false;
  std::optional<std::string> log_level;
  bool dataloader_drop_last = false;
  bool graph_harvesting = false;
  bool disable_python_gc = false;

  Checkpoint checkpoint;
  Pipeline pipeline;
  ActivationCheckpointing activation_checkpointing;
  FlopsProfiler flops_profiler;
  FileMonitor tensorboard;
  FileMonitor csv_monitor;
  Wandb wandb;
  Comet comet;
  CommsLogger comms_logger;
  Compile compile;
  Elasticity elasticity;
  Own tessera;
  // Values of keys that nothing reads: rows of the table without a member. By path, "elasticity.min_time"; all are here.
  std::map<std::string, UnreadValue> unread = unread_values();

  // Sections that are known by name only and switched on in the configuration, e.g.
  // "data_efficiency".
  std::vector<std::string> foreign_sections;
  // One line each: unknown top-level keys, deprecated keys, values that were converted.
  std::vector<std::string> warnings;
  // Paths of the keys that the user gave, with the spelling used: {"bf16.enabled",
  // "bfloat16.enabled"}.
  std::map<std::string, std::string> given;

  // Value error that lists everything wrong: syntax (with line), unknown and duplicate keys, types,
  // ranges and contradictions. A file that cannot be read is a value error too.
  static Config from_file(const std::string& path);
  static Config from_json(const std::string& text);

  // Checks ranges and contradictions; value error that lists all of them. Factories have done this.
  void validate() const;

  // The batch triple for `data_parallel_size` ranks (>= 1). Value error with the equation and its
  // numbers when nothing or only gradient_accumulation_steps is given, or when the numbers do not
  // fit.
  Batch resolve_batch(int64_t data_parallel_size) const;

  // The value under a path such as "zero_optimization.stage", any spelling of its parts; for a section, all of it. dtypes
  // and enums are texts ("bf16", "mean"), an unset value is null. Value error that names the nearest key for another path.
  Value get(const std::string& path) const;
  // The whole tree, defaults included; a configuration that has it is read to the same values.
  Params to_dict(bool all = true) const;  // all = false: only keys that were given

  // The effective configuration, one "path = value (given | default | derived)" a line. `all`
  // false: only what differs from the defaults.
  std::string describe(bool all = true) const;
};

}  // namespace tessera::config

namespace tessera {
using config::Config;
}
