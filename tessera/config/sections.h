// Sections of the configuration other than zero_optimization. Members carry the JSON keys;
// docs/config.md has the meaning and aliases of each. Defaults are those of a configuration that
// does not mention the key.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/config/value.h"

namespace tessera::config {

struct Optimizer {
  std::string type;  // empty: the configuration names no optimizer
  Params params;     // config/resolve.h turns them into optim::OptimizerOptions
};

struct Scheduler {
  std::string type;  // empty: the configuration names no schedule
  Params params;     // config/resolve.h turns them into optim::ScheduleOptions
};

struct Bf16 {
  bool enabled = false;
  bool check_grad_overflow = true;
  bool bf16_master_weights_and_grads = false;
  bool bf16_optimizer_states = false;
};

struct Fp16 {
  bool enabled = false;
  bool auto_cast = false;
  double loss_scale = 0;  // 0: dynamic
  int64_t initial_scale_power = 16;
  int64_t loss_scale_window = 1000;
  int64_t hysteresis = 2;
  bool consecutive_hysteresis = false;
  int64_t min_loss_scale = 1;
  bool fp16_master_weights_and_grads = false;
};

struct TorchAutocast {
  bool enabled = false;
  std::optional<c10::ScalarType> dtype;
  // Modules; unset: Linear and the three convolutions of torch.nn.
  std::optional<std::vector<std::string>> lower_precision_safe_modules;
};

// Dtypes; unset: the precision mode's.
struct DataTypes {
  std::optional<c10::ScalarType> grad_accum_dtype;
  std::optional<c10::ScalarType> param_dtype;
  std::optional<c10::ScalarType> buffer_dtype;
  // Patterns of names of buffers that are fp32 in 16-bit modes. Unset: what a model of Transformers says of itself.
  std::optional<std::vector<std::string>> keep_in_fp32_modules;
};

struct TensorParallelGroup {
  int64_t tp_size = 1;
  int64_t tp_grain_size = 1;
  Value mpu;  // objects: only from Python, read there
  Value tp_group;
};

struct TensorParallel {
  int64_t autotp_size = 0;  // 0 and 1: off
  std::optional<std::string> preset_model;
  Value partition_config;
  TensorParallelGroup tp;
  std::optional<c10::ScalarType> dtype;
  bool tp_overlap_comm = false;
  Value vocab_parallel_lm_head;
};

enum class TagValidation { Ignore, Warn, Fail };
enum class CheckpointFormat { Tessera, DeepSpeed };
struct Checkpoint {
  TagValidation tag_validation = TagValidation::Warn;
  CheckpointFormat format = CheckpointFormat::Tessera;
  bool load_universal = false;
  bool asynchronous = false;
  int64_t keep_last = 0;
  bool random_state = false;
};

struct Pipeline {
  std::string schedule = "1f1b";
  int64_t activation_checkpoint_interval = 0;
};

struct ActivationCheckpointing {
  bool partition_activations = false;
  bool cpu_checkpointing = false;
  bool synchronize_checkpoint_boundary = false;
  bool profile = false;
};

struct FlopsProfiler {
  bool enabled = false;
  double recompute_fwd_factor = 0.0;
  int64_t profile_step = 1;
  int64_t module_depth = -1;
  int64_t top_modules = 1;
  bool detailed = true;
  std::optional<std::string> output_file;
};

struct FileMonitor {  // tensorboard, csv_monitor
  bool enabled = false;
  std::string output_path;
  std::string job_name = "DeepSpeedJobName";
};
struct Wandb {
  bool enabled = false;
  std::optional<std::string> group;
  std::optional<std::string> team;
  std::string project = "deepspeed";
};
struct Comet {
  bool enabled = false;
  int64_t samples_log_interval = 100;
  std::optional<std::string> project;
  std::optional<std::string> workspace;
  std::optional<std::string> api_key;
  std::optional<std::string> experiment_name;
  std::optional<std::string> experiment_key;
  std::optional<bool> online;
  std::optional<std::string> mode;
};

struct CommsLogger {
  bool enabled = false;
  bool verbose = false;
  bool prof_all = true;
  bool debug = false;
  std::vector<std::string> prof_ops;
};

struct Compile {
  bool deepcompile = false;
};

struct Elasticity {
  bool enabled = false;
  int64_t max_train_batch_size = 2000;
  std::vector<int64_t> micro_batch_sizes{2, 4, 6};
  int64_t min_gpus = 1;
  int64_t max_gpus = 10000;
  int64_t num_gpus_per_node = 1;
  int64_t model_parallel_size = 1;
  bool prefer_larger_batch = true;
  bool ignore_non_elastic_batch_info = false;
  double version = 0.2;
};

// Tessera's own keys.
struct Own {
  int64_t min_unit_elements = 1 << 20;  // smaller neighbouring units are merged
  std::optional<int64_t> state_bytes;   // config/precision.cpp
  std::optional<std::string> rounding;  // "nearest", "stochastic"
  int64_t seed = 0;                     // of stochastic rounding
  bool broadcast_buffers = true;        // buffers start with rank 0's values
  bool shared_parameters = false;       // ranks of one host keep one copy of the compute parameters
  bool update_in_backward = false;      // no gradient outlives the backward
  bool update_runs_on = false;          // an update of states that are away runs on into the next forward
  std::optional<std::string> clip;      // what gradient_clipping holds for: "global", "unit", "previous"
  bool clip_by_unit = false;            // the same as "unit"
  // The device's share of states that live elsewhere and that the host would update; unset: the fastest.
  std::optional<double> device_share = 0.0;
  double device_reserve = 0.4;            // share of the device's memory that offload_optimizer.ratio "auto" spares
  bool sequence_parallel_norms = false;   // tensor parallelism cuts the activations between blocks
  std::optional<std::string> json_lines;  // a file for the numbers and warnings of a run
};

}  // namespace tessera::config
