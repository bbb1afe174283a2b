// Optimizers without an engine: Tessera's update rules as optimizers of torch, in the place of torch::optim's.
//
//   auto optimizer = tessera::nn::make_optimizer("AdamW", model->named_parameters(),
//                                                {.set = [](tessera::optim::GroupOptions& options) { options.lr = 3e-4; }});
//   loss.backward();
//   optimizer->step();
//   optimizer->zero_grad();
//
// Note [Parameters without an engine]
//   Adam, AdamW, SGD, Lion and Adagrad update fp32, bf16 and fp16 parameters of any layout on the CPU, in one fused pass over each; FusedAdam
//   on a device, too, where Tessera has its kernels. Their states are fp32 whatever the parameter is. A 16-bit parameter is its own
//   master: it is read as fp32, updated, and rounded to nearest, so that updates below half a step of its format are lost; with
//   `stochastic_rounding` they are kept in the mean. The other types compute in the parameter's dtype, on any device.
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/nn/recipe.h"
#include "tessera/optim/optimizer.h"
#include "tessera/optim/types.h"

namespace tessera::nn {

struct OptimizerArguments {
  // Changes the type's defaults, which all groups begin with; with Muon it is called for those of matrices (use_muon) and of others.
  std::function<void(optim::GroupOptions& options)> set = {};
  std::vector<ParamGroup> groups = {};  // as in a Recipe; `takes` gets the names of the parameters
  // Of 16-bit parameters, for types with a kernel. Random bits depend on `seed`, the parameter's step and the element, on nothing
  // else, so that a resumed run draws the same.
  bool stochastic_rounding = false;
  uint64_t seed = 0;
};

// Makes the optimizer of a type: those that a configuration can name in C++ (optim::cpp_types()), with torch's defaults (Adam adds weight_decay to
// the gradient, AdamW decays 0.01), and FusedAdam, which is AdamW that decays nothing. It counts each parameter's steps, and leaves out those
// without a gradient. torch::save(*optimizer, file) writes states and hyper-parameters as torch::optim's class of the same name does, and
// each loads what the other wrote; load() replaces all states. `step` checks everything before it changes anything. Value error for an
// unknown type, wrong hyper-parameters, and what groups of a Recipe are refused for; RMSprop, and Adam and AdamW where a group has
// amsgrad, are torch::optim's own classes, with options of theirs.
std::shared_ptr<torch::optim::Optimizer> make_optimizer(const std::string& type,
                                                        const torch::OrderedDict<std::string, at::Tensor>& params,
                                                        const OptimizerArguments& arguments = {});

// What an engine takes of such an optimizer, to run the rule itself; nothing of other classes, torch::optim's among them. Value error
// for hyper-parameters out of their bounds, as step() has it. For front ends.
struct MadeOptimizer {
  const optim::Type* type;
  std::vector<optim::GroupOptions> groups;
  bool stochastic_rounding = false;  // of any group
};
std::optional<MadeOptimizer> made_optimizer(torch::optim::Optimizer& optimizer);

// The hyper-parameters of a param group of such an optimizer, which may be changed between steps. A group comes to
// add_param_group() without options: it gets those that all began with. Value error for options of another class.
optim::GroupOptions& group_options(torch::optim::OptimizerParamGroup& group);

}  // namespace tessera::nn
