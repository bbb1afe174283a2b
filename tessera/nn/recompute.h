// Activation checkpointing: a part of a forward that keeps its inputs only.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "tessera/comm/mesh.h"
#include "tessera/config/config.h"

namespace tessera::nn {

// How inputs are kept that are no parameters.
struct RecomputeOptions {
  bool on_host = false;  // in host memory
  // Keeps inputs in slices on the ranks of the group, where they are alike; a backward is collective over it then. Null: whole.
  comm::GroupPtr slices = nullptr;
};
// Options of the section activation_checkpointing: cpu_checkpointing, and partition_activations over tensor-parallel ranks.
RecomputeOptions recompute_options(const config::Config& config, const comm::Mesh& mesh);

// Returns f(inputs), of which the graph keeps `inputs` and nothing else: the backward runs f once more, with the random numbers
// and the autocast of the first time. `f` must have trained parameters, which must be as they were, and return defined tensors.
// `f` is called on the thread that autograd uses. Gradients are as without recomputation; all floating outputs have a graph.
std::vector<at::Tensor> recompute(std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> f,
                                  const std::vector<at::Tensor>& inputs, const RecomputeOptions& options = {});

}  // namespace tessera::nn
