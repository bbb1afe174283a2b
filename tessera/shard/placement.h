// Placement: how a flat buffer is spread over the data-parallel ranks. A ZeRO stage is a row of a table; nothing else
// in the code asks which stage it is.
#pragma once

#include <cstdint>

namespace tessera::shard {

enum class Placement : uint8_t {
  Replicate,  // every rank holds the whole buffer, equal everywhere
  Shard,      // rank r holds the r-th equal slice
  Partial,    // every rank holds a whole buffer of its own contributions; their sum is the value
};

enum class ReduceAt : uint8_t {
  Boundary,       // once per optimizer step: gradients stay Partial between micro-batches
  EveryBackward,  // after every backward
};

struct StagePlacements {
  Placement params;  // compute parameters between uses
  Placement grads;   // gradients once reduced
  ReduceAt reduce_at;
  Placement states;  // master weights and optimizer states

  bool shards_params() const { return params == Placement::Shard; }
  bool shards_grads() const { return grads == Placement::Shard; }
  bool shards_states() const { return states == Placement::Shard; }
};

// Stages 0 to 3 (ZeRO: Rajbhandari et al., arXiv:1910.02054). Value error for another stage.
const StagePlacements& placements_of_stage(int stage);

}  // namespace tessera::shard
