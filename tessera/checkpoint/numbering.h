// Numbering: which elements of a whole tensor some elements of a part of it are.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/checkpoint/manifest.h"
#include "tessera/shard/cut.h"
#include "tessera/shard/storage.h"

namespace tessera::checkpoint {

// Elements [begin, begin + size) of the whole, in its order, are elements [local, local + size) of a part.
struct Run {
  int64_t begin = 0, local = 0, size = 0;
  bool operator==(const Run&) const = default;
};

// Runs of the elements `range` of `slice` of a tensor (null: of the whole), ascending in `local`. Slices are of tensors in
// the usual order.
std::vector<Run> runs_of(const std::vector<int64_t>& shape, const Slice* slice, shard::Range range);
// How many elements a slice of `shape` has.
int64_t numel_of(const std::vector<int64_t>& shape, const Slice* slice);
// Dims from the slowest to the fastest in memory; empty for the usual order.
std::vector<int64_t> order_of(const shard::Form& form);

}  // namespace tessera::checkpoint
