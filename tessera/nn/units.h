// From a torch::nn module to the parameters of an engine.
#pragma once

#include <torch/nn/module.h>

#include <vector>

#include "tessera/engine/engine.h"

namespace tessera::nn {

// The parameters of `module` in the order of named_parameters(), a tied one once under its first name. Those that
// require a gradient get optimizer group 0, the others -1. Every child of an outermost torch::nn::Sequential or
// torch::nn::ModuleList is a unit named by its path; everything else is the unit "root". Local.
std::vector<engine::ParamSpec> param_specs(const torch::nn::Module& module);

}  // namespace tessera::nn
