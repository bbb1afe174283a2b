#include "tessera/nn/sizes.h"

#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <iomanip>
#include <optional>
#include <sstream>
#include <string>
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
