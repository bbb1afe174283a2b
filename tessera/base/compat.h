// Every fork between torch versions lives here.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

namespace tessera::compat {

// Owning handle of an autograd node, whatever torch makes it.
using NodePtr = decltype(torch::autograd::Edge::function);

}  // namespace tessera::compat
