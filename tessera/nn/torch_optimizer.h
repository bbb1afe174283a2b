// The optimizers of torch::optim, and of Python's torch.optim (element_optimizer.h), that a configuration names and no rule of
// optim/types.h is for.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "tessera/optim/types.h"

namespace tessera::nn {

// Hyper-parameters as torch::optim has them, of a type of optim::find_torch_type().
std::unique_ptr<torch::optim::OptimizerOptions> torch_options(const optim::Type& type,
                                                              const optim::GroupOptions& group);
// Makes an optimizer over parameters by group. Value error for hyper-parameters that are out of their bounds.
std::shared_ptr<torch::optim::Optimizer> torch_optimizer(const optim::Type& type,
                                                         const std::vector<optim::GroupOptions>& groups,
                                                         const std::vector<std::vector<at::Tensor>>& params);

}  // namespace tessera::nn
