// From a torch::nn module to the parameters of an engine.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

#include "tessera/engine/engine.h"
#include "tessera/engine/unit_policy.h"

namespace tessera::nn {

// Outline of `module` in the terms of unit_policy.h. A module's class goes by Module::name() ("my::BlockImpl"), by the last part
// of that name, and by both without the "Impl" of what a module holder holds.
engine::Outline outline(const torch::nn::Module& module);

// From a model to the unit of each parameter, by name; absent names join the unit "root".
using UnitPolicy = std::function<engine::UnitNames(const torch::nn::Module&)>;
// engine::default_units.
engine::UnitNames default_unit_policy(const torch::nn::Module& module);

// The parameters of `module` in the order of named_parameters(), a tied one once under its first name. Parameters that
// require a gradient get optimizer group 0, the others -1. Local.
std::vector<engine::ParamSpec> param_specs(const torch::nn::Module& module, const engine::UnitNames& units);

// Marks in `specs` (from param_specs of the same module) the parameters that modules of exactly these classes own: they
// travel in `dtype`. Names: "torch.nn.Linear" (or "torch.nn.modules.linear.Linear") and the other modules of torch with
// parameters, or what Module::name() says of a class of your own. Value error for a name that is neither.
void mark_autocast(const torch::nn::Module& module, const std::vector<std::string>& names, at::ScalarType dtype,
                   std::vector<engine::ParamSpec>& specs);
// The classes to mark where the configuration names none.
std::vector<std::string> default_autocast_modules();

// Floating-point buffers of `module` (running means and the like) become `dtype`, where that is given, and those whose names have
// one of the patterns `in_fp32` (data_types.keep_in_fp32_modules) fp32, in place: holders of a buffer see it. Local.
void cast_buffers(const torch::nn::Module& module, std::optional<at::ScalarType> dtype,
                  const std::vector<std::string>& in_fp32);

}  // namespace tessera::nn
