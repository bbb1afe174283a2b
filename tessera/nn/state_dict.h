// The state dict of a live engine's module: whole values by name, out and in.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

#include "tessera/checkpoint/weight_files.h"
#include "tessera/engine/engine.h"

namespace tessera::nn {

using checkpoint::NamedTensors;

struct LoadOptions {
  bool strict = true;  // every name of the module must be there, and no other
  // Maps a name in the module to the name in the dict or the files; none: the same.
  std::function<std::string(const std::string&)> rename = {};
};
// What a load that is not strict has left: names of the module that got no value, and names that nothing in it has. A tied
// parameter has its value by any of its names.
struct LoadedNames {
  std::vector<std::string> missing = {}, unexpected = {};
};

// The work of Session's calls of these names.
NamedTensors module_state_dict(const torch::nn::Module& module, engine::Engine& core, bool frozen);
LoadedNames load_state_dict(const torch::nn::Module& module, engine::Engine& core, const NamedTensors& state,
                            const LoadOptions& options);
LoadedNames load_state_dict(const torch::nn::Module& module, engine::Engine& core,
                            const checkpoint::WeightReader& files, const LoadOptions& options);

}  // namespace tessera::nn
