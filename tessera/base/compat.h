// Forks between torch versions; forks of one layer only are in its own compat.h.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <memory>
#include <utility>

namespace tessera::compat {

// Owning handle of an autograd node, whatever torch makes it.
using NodePtr = decltype(torch::autograd::Edge::function);

template <class P>
inline constexpr bool kIsStd = requires(const P& p) { p.owner_before(p); };  // std::shared_ptr

template <class N, class P = NodePtr, class... A>
P make_node(A&&... arguments) {
  if constexpr (kIsStd<P>) {
    return std::make_shared<N>(std::forward<A>(arguments)...);
  } else {
    return P(c10::make_intrusive<N>(std::forward<A>(arguments)...));
  }
}

// A handle that does not keep the node alive.
template <class P>
auto weak(const P& node) {
  if constexpr (kIsStd<P>) {
    return std::weak_ptr<typename P::element_type>(node);
  } else {
    return c10::weak_intrusive_ptr<typename P::element_type>(node);
  }
}

// The leaf whose gradient `node` accumulates; undefined for other nodes.
inline at::Tensor leaf_of(const torch::autograd::Node& node) {
  const auto* const accumulates = dynamic_cast<const torch::autograd::AccumulateGrad*>(&node);
  return accumulates != nullptr ? at::Tensor(accumulates->variable) : at::Tensor();
}

}  // namespace tessera::compat
