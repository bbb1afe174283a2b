// The zero_optimization section. Members carry the JSON keys; docs/config.md has the meaning and
// aliases of each.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace tessera::config {

enum class OffloadDevice { None, Cpu, Nvme };

// Absent, null, false and device none all mean: no offload.
struct OffloadOptimizer {
  OffloadDevice device = OffloadDevice::None;
  std::optional<std::string> nvme_path;
  int64_t buffer_count = 4;
  bool pin_memory = true;
  std::optional<double> ratio = 1.0;  // share of the states that live elsewhere; unset: what does not fit on the device
  bool super_offload = false;
};

struct OffloadParam {
  OffloadDevice device = OffloadDevice::None;
  std::optional<std::string> nvme_path;
  int64_t buffer_count = 5;
  int64_t buffer_size = 100'000'000;   // elements
  int64_t max_in_cpu = 1'000'000'000;  // elements
  bool pin_memory = true;
};

struct LeafModule {
  std::vector<std::string> classes{"transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
                                   "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
                                   "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock"};
  std::vector<std::string> names;
  std::vector<std::string> name_suffixes;
};

// Sizes are in elements, not bytes.
struct ZeroOptimization {
  int64_t stage = 0;
  bool reduce_scatter = true;
  int64_t reduce_bucket_size = 500'000'000;
  int64_t allgather_bucket_size = 500'000'000;
  std::optional<bool> overlap_comm;  // unset: see zero_options() in config/resolve.h
  bool load_from_fp32_weights = true;
  OffloadOptimizer offload_optimizer;
  OffloadParam offload_param;
  int64_t stage3_prefetch_bucket_size = 50'000'000;
  int64_t stage3_param_persistence_threshold = 100'000;
  int64_t stage3_model_persistence_threshold = std::numeric_limits<int64_t>::max();
  int64_t stage3_max_live_parameters = 1'000'000'000;
  int64_t stage3_max_reuse_distance = 1'000'000'000;
  bool stage3_gather_16bit_weights_on_model_save = false;
  int64_t stage3_module_granularity_threshold = 0;
  bool ignore_unused_parameters = true;
  bool legacy_stage1 = false;
  int64_t zero_hpz_partition_size = 1;
  bool zero_quantized_weights = false;
  bool zero_quantized_nontrainable_weights = false;
  bool zero_quantized_gradients = false;
  int64_t mics_shard_size = -1;
  LeafModule leaf_module;
};

}  // namespace tessera::config
