// Every fork between torch versions (2.11 to current) lives here.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

namespace tessera::compat {

// Owning handle of an autograd node: std::shared_ptr up to 2.12, c10::intrusive_ptr from 2.13.
using NodePtr = decltype(torch::autograd::Edge::function);

}  // namespace tessera::compat
