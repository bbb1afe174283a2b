// Named shard: which elements of which parameter a rank holds, of which quantity. It says nothing of stages, units or
// ranks, so what is a loop over named shards (checkpoints, export) fits every way to spread a model.
#pragma once

#include <ATen/core/ScalarType.h>

#include <cstdint>
#include <string>

#include "tessera/shard/cut.h"
#include "tessera/shard/storage.h"

namespace tessera::shard {

enum class Quantity : uint8_t {
  Weight,    // what the module computes with
  Master,    // what the optimizer updates
  Gradient,  // reduced
  State0,    // of the optimizer, see optim::state_names
  State1,
};

// Example: of a 4 x 6 weight that lies in memory column by column, rank 1 of 2 holds {form {4, 6}, {1, 4}, range [12, 24)}:
// the last three columns.
struct NamedShard {
  std::string name;  // of the parameter
  int param = -1;    // in the engine's list
  Quantity quantity = Quantity::Weight;
  Form form;                          // sizes of the whole parameter, and strides: the order of its elements
  Range range;                        // the elements in that order; empty for a parameter without elements only
  at::ScalarType dtype = at::kFloat;  // the elements' dtype here; Float for a split master, which is exact in it
  int replica = 0;                    // number among those that hold the same elements
  int replicas = 1;                   // how many hold the same elements
  bool trained = true;                // has an optimizer group
  CutPtr cut{};                       // which elements of a whole the parameter is; null: all. The range is within it
};

}  // namespace tessera::shard
