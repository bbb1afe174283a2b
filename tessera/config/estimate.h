// What a rank holds of model states, from the configuration's own precision and placements, with the device of the model apart
// from the host. Activations, and what torch itself takes, are not in it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/mesh.h"
#include "tessera/config/config.h"

namespace tessera::parallel {
struct Plan;
}

namespace tessera::config {

// Elements of a tensor-parallel rank's slice of a model.
struct ModelSizes {
  int64_t trained = 0, frozen = 0;
  std::vector<int64_t> units{};  // elements of each unit, in any order; empty: only the number of all is known
};

// A parameter of a model that is whole, or of what is there of it.
struct SizedParam {
  std::string name, unit;
  int64_t elements = 0;
  bool trained = true;
};
// Sizes of a tensor-parallel rank's slice of these, the longest of each; null `plan`: of all of them. Pure.
ModelSizes sizes_of(const std::vector<SizedParam>& params, const parallel::Plan* plan = nullptr);
// The same of a number of parameters, all of them trained.
ModelSizes sizes_of(int64_t count, const Config& config);

// Bytes of one rank: the first four on the device, and with offload the last two in host memory and on the disk.
struct Estimate {
  int64_t stage = 0;
  int64_t params = 0;
  int64_t grads = 0;     // at the end of a backward; none while a forward runs
  int64_t states = 0;    // masters and what the optimizer keeps; for an unknown optimizer two values an element
  int64_t gathered = 0;  // stage 3: the two largest units, whole: one that runs and one that is fetched
  int64_t host = 0, disk = 0;

  int64_t total() const { return params + grads + states + gathered; }  // on the device
};

// `ranks`: all of the job, of which `config` makes tensor-parallel, sequence-parallel and shard groups. What is found on the
// device ("auto") counts as if all states were away and the host updated them. Value error where the ranks do not divide.
Estimate estimate(const ModelSizes& sizes, const Config& config, int ranks);
// The estimate for ranks on such a mesh.
Estimate estimate(const ModelSizes& sizes, const Config& config, const comm::MeshShape& mesh);

// `config` with another zero_optimization.stage; value error, not-implemented error where the two do not go together.
Config with_stage(const Config& config, int64_t stage);

// Ranks that the configuration cuts a model over.
int64_t tensor_parallel_ranks(const Config& config);

}  // namespace tessera::config
