// Modules whose forward the engine sees: what torch::nn lacks. Needed for partitioned parameters (stage 3) only, and
// harmless elsewhere.
//
//   struct BlockImpl : tessera::nn::Hooked<BlockImpl, at::Tensor(at::Tensor)> {
//     at::Tensor forward_impl(at::Tensor x);            // what forward would have been
//   };
//   TORCH_MODULE(Block);                                // works in Sequential, ModuleList, AnyModule, holders; of
//                                                       // those, at<BlockImpl>(i) alone does not compile: use ptr(i)
//
// The parameters below a Hooked module are gathered around its forward and its backward. Parameters that are below none
// are gathered for the whole of Engine::forward. A module of another library goes into a Hooked one of yours.
#pragma once

#include <torch/nn/cloneable.h>

#include <tuple>
#include <utility>
#include <vector>

#include "tessera/nn/outputs.h"
#include "tessera/nn/scope.h"

namespace tessera::nn {

template <class D, class Signature>
class Hooked;

template <class D, class R, class... A>
class Hooked<D, R(A...)> : public torch::nn::Cloneable<D>, public ScopeHolder {
 public:
  void reset() override {}

  R forward(A... arguments) {
    ModuleScope call(scope());
    if (call.wants_tensors()) {
      std::vector<at::Tensor> inputs;
      (append_tensors(arguments, inputs), ...);
      call.note_inputs(inputs);
    }
    R result = static_cast<D*>(this)->forward_impl(std::forward<A>(arguments)...);
    std::vector<at::Tensor> outputs;
    if (call.wants_tensors()) append_tensors(result, outputs);
    call.finish(outputs);
    return result;
  }
};

}  // namespace tessera::nn
