// Activation checkpointing: a part of a forward that keeps its inputs only.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tessera::nn {

// f(inputs), of which the graph keeps `inputs` and nothing else: the backward runs f once more, with the random numbers and the
// autocast of the first time. `f` must have trained parameters, which must be as they were, and returns defined tensors.
// It is called on the thread that autograd uses. Gradients are those without it; outputs of a floating dtype all have a graph.
std::vector<at::Tensor> recompute(std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> f,
                                  const std::vector<at::Tensor>& inputs);

}  // namespace tessera::nn
