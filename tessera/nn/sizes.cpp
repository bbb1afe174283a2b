#include "tessera/nn/sizes.h"

#include <torch/nn/modules/linear.h>

#include <optional>
#include <vector>

#include "tessera/nn/cut_model.h"
#include "tessera/nn/parallel.h"

namespace tessera::nn {

namespace {

double own_linear_flops(const torch::nn::Module& part) {
  const auto weights = [](const auto* linear) {
    return linear == nullptr ? 0.0
                             : static_cast<double>(linear->options.in_features() * linear->options.out_features());
  };
  return 6 * (weights(part.as<torch::nn::Linear>()) + weights(part.as<ColumnLinear>()) + weights(part.as<RowLinear>()));
}

}  // namespace

config::ModelSizes model_sizes(const torch::nn::Module& module, const Config& config, const UnitPolicy& policy) {
  std::optional<parallel::Plan> plan;
  if (const int64_t ranks = config::tensor_parallel_ranks(config); ranks > 1)
    plan = plan_for(module, config, static_cast<int>(ranks));
  std::vector<config::SizedParam> params;
  for (const engine::ParamSpec& param : param_specs(module, policy(module)))
    params.push_back({param.name, param.unit, param.tensor.numel(), param.group >= 0});
  return config::sizes_of(params, plan ? &*plan : nullptr);
}

double linear_flops(const torch::nn::Module& module) {
  double all = 0;
  for (const auto& part : module.modules())
    all += own_linear_flops(*part);
  return all;
}

}  // namespace tessera::nn
