// Weights of a live engine as files that other tools load (checkpoint/weight_files.h), in the dtypes that the module
// computes in.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/engine/logical.h"

namespace tessera::engine {

// Why save_16bit_model() writes nothing.
inline constexpr const char* kNothingExported =
    "[engine.save_16bit_model] nothing is written: parameters are partitioned; set "
    "zero_optimization.stage3_gather_16bit_weights_on_model_save to gather them for the file";

// What an engine holds, whole. Collective where nothing else is stated: rank 0 (Checkpointer::place()) gets the values, one
// parameter at a time, and no other rank keeps any.
class LiveWeights {
 public:
  explicit LiveWeights(Engine& engine);

  // On rank 0 in the parameter's shape, dtype and order of elements; undefined elsewhere. `place`: see places_of().
  at::Tensor whole(int param, const std::vector<checkpoint::Along>& place = {});

 private:
  Engine& engine_;
  std::vector<shard::NamedShard> weights_;  // what this rank holds, by parameter; param -1: nothing
};

// One tensor of the files: a parameter by its number, or another tensor (a buffer), with rank 0's values.
struct LiveTensor {
  std::vector<std::string> names;
  int param = -1;
  at::Tensor tensor{};
};

// All ranks name the same tensors. Returns the names of the files. An error of one rank is an error on all, and nothing
// appears in the folder then.
std::vector<std::string> export_weights(Engine& engine, const std::vector<LiveTensor>& tensors,
                                        const std::string& folder, const std::string& name, int64_t max_bytes);

}  // namespace tessera::engine
