#include "tessera/nn/torch_optimizer.h"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>

#include <string_view>
#include <tuple>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/nn/element_optimizer.h"

namespace tessera::nn {
namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;
using OptionsPtr = std::unique_ptr<torch::optim::OptimizerOptions>;

struct Maker {
  std::string_view name;
  OptionsPtr (*options)(const optim::GroupOptions& group);
  std::shared_ptr<torch::optim::Optimizer> (*optimizer)(const Groups& groups);
};

template <class Options>
OptionsPtr adam_options(const optim::GroupOptions& g) {
  Options options(g.lr);
  options.betas(std::make_tuple(g.beta1, g.beta2)).eps(g.eps).weight_decay(g.weight_decay).amsgrad(g.amsgrad);
  return std::make_unique<Options>(options);
}

OptionsPtr rmsprop_options(const optim::GroupOptions& g) {
  torch::optim::RMSpropOptions options(g.lr);
  options.alpha(g.alpha).eps(g.eps).weight_decay(g.weight_decay).momentum(g.momentum).centered(g.centered);
  return std::make_unique<torch::optim::RMSpropOptions>(options);
}

template <class Class>
std::shared_ptr<torch::optim::Optimizer> optimizer_over(const Groups& groups) {
  return std::make_shared<Class>(groups);
}

const Maker& maker_of(const optim::Type& type) {
  using namespace torch::optim;
  static const std::vector<Maker> all{{"Adam", adam_options<AdamOptions>, optimizer_over<Adam>},
                                      {"AdamW", adam_options<AdamWOptions>, optimizer_over<AdamW>},
                                      {"RMSprop", rmsprop_options, optimizer_over<RMSprop>}};
  for (const Maker& one : all)
    if (one.name == type.name) return one;
  TESSERA_FAIL(c10::Error, "[initialize] torch::optim has no ", type.name);
}

}  // namespace

OptionsPtr torch_options(const optim::Type& type, const optim::GroupOptions& group) {
  if (ElementOptimizer::is_made_here(type)) return std::make_unique<ElementOptimizer::Options>(group);
  return maker_of(type).options(group);
}

std::shared_ptr<torch::optim::Optimizer> torch_optimizer(const optim::Type& type,
                                                         const std::vector<optim::GroupOptions>& groups,
                                                         const std::vector<std::vector<at::Tensor>>& params) {
  Groups all;
  for (size_t i = 0; i < groups.size(); ++i) {
    optim::check(type, groups[i]);
    all.emplace_back(params[i], torch_options(type, groups[i]));
  }
  if (ElementOptimizer::is_made_here(type)) return std::make_shared<ElementOptimizer>(type, all);
  return maker_of(type).optimizer(all);
}

}  // namespace tessera::nn
