// How large a model is, for estimates (tessera/config/estimate.h), and what a token takes.
#pragma once

#include <torch/nn/module.h>

#include <string>

#include "tessera/config/estimate.h"
#include "tessera/nn/units.h"

namespace tessera::nn {

// Elements of a tensor-parallel rank's slice of `module`, which is whole and stays as it is (on the meta device it takes no
// memory). Value errors of plan_for(). Local, pure.
//   config::estimate(nn::model_sizes(*model, config), config, 8).total()
config::ModelSizes model_sizes(const torch::nn::Module& module, const Config& config,
                               const UnitPolicy& policy = default_unit_policy);

// Operations of one token in the forward and the backward of a model's linear layers, cut ones as a whole: 6 for each weight. Products
// of activations, as in attention, are the program's to add.
double linear_flops(const torch::nn::Module& module);
// The same by module, each with all below it: a line "path (class): parameters, operations of a token, share" for every module that
// has any, down to `depth` (-1: all); of what is cut along tp the parameters are this rank's. Local.
std::string flops_text(const torch::nn::Module& module, int depth = -1);

}  // namespace tessera::nn
