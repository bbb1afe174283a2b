// The part of a whole tensor that a rank holds.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/parallel/sizes.h"

namespace tessera::parallel {

inline at::Tensor part(const at::Tensor& whole, int64_t dim, const Sizes& sizes, int rank) {
  const auto range = ranges_of(sizes)[rank];
  return whole.narrow(dim, range.begin, range.size()).contiguous();
}

}  // namespace tessera::parallel
