#include "tessera/nn/sizes.h"

#include <algorithm>
#include <map>
#include <string>

#include "tessera/nn/cut_model.h"

namespace tessera::nn {

namespace {

struct Share {
  int64_t most = 1, whole = 1;
};

// Parameters that the plan cuts: the longest slice, and of how much.
std::map<std::string, Share> shares_of(const torch::nn::Module& module, const Config& config) {
  std::map<std::string, Share> found;
  const int64_t ranks = config::tensor_parallel_ranks(config);
  if (ranks == 1) return found;
  for (const parallel::Decision& cut : plan_for(module, config, static_cast<int>(ranks)).decisions) {
    if (cut.partition == parallel::Partition::Skip) continue;
    const parallel::Sizes sizes = cut.sizes();
    const Share share{*std::max_element(sizes.begin(), sizes.end()), cut.total};
    found[cut.path + "." + cut.param] = share;
    if (cut.partition == parallel::Partition::Column) found[cut.path + ".bias"] = share;
  }
  return found;
}

}  // namespace

config::ModelSizes model_sizes(const torch::nn::Module& module, const Config& config, const UnitPolicy& policy) {
  const auto shares = shares_of(module, config);
  config::ModelSizes sizes;
  std::map<std::string, int64_t> units;
  for (const engine::ParamSpec& param : param_specs(module, policy(module))) {
    const auto share = shares.find(param.name);
    const int64_t whole = param.tensor.numel();
    const int64_t count = share == shares.end() ? whole : whole * share->second.most / share->second.whole;
    units[param.unit] += count;
    (param.group >= 0 ? sizes.trained : sizes.frozen) += count;
  }
  for (const auto& [name, count] : units)
    sizes.units.push_back(count);
  return sizes;
}

}  // namespace tessera::nn
