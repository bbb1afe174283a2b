#include "tessera/nn/sizes.h"

#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <iomanip>
#include <map>
#include <sstream>
#include <string>

#include "tessera/nn/cut_model.h"
#include "tessera/nn/parallel.h"

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

double own_linear_flops(const torch::nn::Module& part) {
  const auto weights = [](const auto* linear) {
    return linear == nullptr ? 0.0
                             : static_cast<double>(linear->options.in_features() * linear->options.out_features());
  };
  return 6 * (weights(part.as<torch::nn::Linear>()) + weights(part.as<ColumnLinear>()) + weights(part.as<RowLinear>()));
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

double linear_flops(const torch::nn::Module& module) {
  double all = 0;
  for (const auto& part : module.modules())
    all += own_linear_flops(*part);
  return all;
}

std::string flops_text(const torch::nn::Module& module, int depth) {
  const double all = linear_flops(module);
  std::ostringstream text;
  text << std::fixed << std::setprecision(1);
  for (const auto& item : module.named_modules()) {
    const std::string& path = item.key();
    const int level = path.empty() ? 0 : 1 + static_cast<int>(std::ranges::count(path, '.'));
    const double flops = linear_flops(*item.value());
    if ((depth >= 0 && level > depth) || flops == 0) continue;
    int64_t params = 0;
    for (const at::Tensor& param : item.value()->parameters())
      params += param.numel();
    text << (text.tellp() > 0 ? "\n" : "") << std::string(2 * static_cast<size_t>(level), ' ')
         << (path.empty() ? "the model" : path) << " (" << item.value()->name() << "): " << params << " parameters, "
         << flops / 1e6 << " MFLOPs of a token, " << 100 * flops / all << " %";
  }
  return text.str();
}

}  // namespace tessera::nn
