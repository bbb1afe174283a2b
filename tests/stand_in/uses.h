// What tensors use of memory, for the race detector.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tests/stand_in/clocks.h"

namespace tessera::stand_in {

Bytes whole(const at::Tensor& t);  // from its first byte to its last
// One range where its elements lie together, else one for each piece that does.
void add_uses(std::vector<Use>& uses, const at::Tensor& t, bool writes, const char* part);

}  // namespace tessera::stand_in
