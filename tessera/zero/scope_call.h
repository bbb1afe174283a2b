// What the hooks on one module call tell the unsharder.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::zero {

// One module call that left a graph behind; lives as long as that graph's nodes. Owned by hooks of autograd nodes.
struct ScopeCall {
  std::vector<int> units;  // what to gather before its backward
  int producers = 0;       // nodes that made its inputs; 0: the end of its backward cannot be seen
  bool outer = false;      // calls that hold units of their own ran inside it
  int arrived = 0;         // of them, in backward number `number`
  int64_t number = -1;     // the backward it was opened in
  int64_t awaited = -1;    // the backward in which the end of its units waits for it
};

}  // namespace tessera::zero
