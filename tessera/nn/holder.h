// Module holders of torch that may hold nothing.
#pragma once

#include <torch/nn/pimpl.h>

#include <type_traits>

namespace tessera::nn::detail {

// The module of a holder; null where it has none, for which its own ptr() has an error in torch's words.
template <class Holder>
auto module_of(const Holder& holder) {
  using Pointer = std::decay_t<decltype(holder.ptr())>;
  return holder.is_empty() ? Pointer() : Pointer(holder.ptr());
}

}  // namespace tessera::nn::detail
