// What the hooks on one module call tell the unsharder.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::zero {

// One module call that left a graph behind; lives as long as that graph's nodes. Owned by hooks of autograd nodes.
struct ScopeCall {
  std::vector<int> units;   // what to gather before its backward
  bool outer = false;       // calls that hold units of their own ran inside it
  int producers = 0;        // nodes that made the call's inputs; 0: none shows that its backward is over
  int arrived = 0;          // producers that gradients have reached, in backward number `opened_in`
  int64_t opened_in = -1;   // number of the last backward that opened the call
  int64_t pending_in = -1;  // number of the last backward in which its units counted it as not over
};

}  // namespace tessera::zero
