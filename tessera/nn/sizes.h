// How large a model is, for estimates (tessera/config/estimate.h), and what a token takes.
#pragma once

#include <torch/nn/module.h>

#include "tessera/config/estimate.h"
#include "tessera/nn/units.h"

namespace tessera::nn {

// Elements of a tensor-parallel rank's slice of `module`, which is whole and stays as it is (on the meta device it takes no
// memory). Value errors of plan_for(). Local, pure.
//   config::estimate(nn::model_sizes(*model, config), config, 8).total()
config::ModelSizes model_sizes(const torch::nn::Module& module, const Config& config,
                               const UnitPolicy& policy = default_unit_policy);

// Operations of one token in the forward and the backward of a model's linear layers, cut ones as a whole: 6 for each weight. Products
// of activations, as in attention, are the program's to add; FlopsProfiler (flops_profiler.h)
// counts them in a run.
double linear_flops(const torch::nn::Module& module);

}  // namespace tessera::nn
